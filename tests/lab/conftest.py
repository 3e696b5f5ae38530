import pytest

from intention.lab import cli
from lab import toy_cli


@pytest.fixture
def toys(monkeypatch, tmp_path):
    """The toys are the experiments, and the working folder is empty."""
    toy_cli.install(monkeypatch.setattr)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def call(toys, capsys):
    """`intention ...` in this process: exit code, what it printed, and what it printed to stderr."""

    def called(*words):
        try:
            code = cli.main([str(word) for word in words])
        except SystemExit as end:  # tyro
            code = end.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return called
