"""The command line: what it refuses, what it reuses, how it stops."""

import importlib
import json
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from intention import __version__
from intention.lab import cli
from intention.lab.cli import commands, options
from intention.lab.core.files import LabError
from intention.lab.core.place import Place
from intention.lab.core.results import read
from intention.lab.core.train import Diverged
from intention.lab.experiments.base import Measure
from intention.lab.run import cluster, runner, search, sweep
from intention.lab.run.runner import Task
from lab import toy_cli, toy_experiment
from lab.toy_cli import ENVIRONMENT, PATIENCE, lines, start, wait_for

pytestmark = pytest.mark.usefixtures("toys")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), ""),
        (("fly",), "no command 'fly'"),
        (("run",), "followed by the name of an experiment: toy, timing"),
        (("run", "--steps", "3", "toy"), "followed by the name"),
        (("run", "tooy"), "no experiment 'tooy'; did you mean toy? There are toy, timing"),
        (("sweep", "anything"), "no experiment 'anything'"),
        (("reproduce", "--only", "toy,nothing"), "no experiment 'nothing'"),
        (("reproduce", "--only", ","), "names no experiment"),
        (("run", "toy", "--stepz", "3"), "--stepz"),
        (("run", "toy", "--steps", "many"), "invalid literal for int"),
        (("run", "toy", "--steps", "0"), "error: steps must be at least 1, got 0"),
        (("run", "toy", "--models", "cube"), "models are ('line', 'plane'), got ('cube',)"),
        (("run", "toy", "--seeds", "0"), "asks for no runs"),
        (("run", "toy", "--preset", "huge"), "huge"),
        (("run", "toy", "--line.width"), "--line.width"),
        (("run", "toy", "--resume", "--fresh"), "give one of the two"),
        (("run", "toy", "--jobs", "2"), "--jobs"),
        (("sweep", "toy", "--jobs", "0"), "jobs must be at least 1, got 0"),
        (("sweep", "toy", "--jobs", "x"), "--jobs"),
        (("reproduce", "--steps", "3"), "--steps"),
        (("list", "toy"), "toy"),
        (("report",), "DIR"),
    ],
)
def test_what_cannot_be_meant_is_told_before_any_work(call, tmp_path, words, message):
    code, out, err = call(*words)
    assert code == 2
    assert message in re.sub(r"[│\s]+", " ", err)
    assert out.startswith("usage") or not out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [("--help",), ("run", "--help"), ("sweep", "toy", "--help"), ("reproduce", "--help")])
def test_help_is_no_error(call, words):
    code, out, err = call(*words)
    assert code == 0
    assert out.startswith("usage: intention")
    assert not err


def test_every_field_is_a_flag_and_its_default_is_the_presets(call):
    code, out, _ = call("run", "toy", "--preset=standard", "--help")
    assert code == 0
    for flag in (
        "--steps INT of training (default: 11)",
        "--plane.width INT (default: 7)",
        "--models [STR",
        "--resume",
    ):
        assert flag in re.sub(r"[│\s]+", " ", out)
    args = ("--preset", "paper", "--line.learning-rate", ".5", "--models", "plane", "line", "--fresh")
    flags, config = options.parse_with_config(options.Run, "run toy", toy_experiment, args)
    assert (flags.fresh, flags.resume, flags.tensorboard) == (True, False, True)
    paper = toy_experiment.PRESETS["paper"]
    assert config == replace(paper, models=("plane", "line"), line=replace(paper.line, learning_rate=0.5))


def test_list_and_version(call):
    code, out, _ = call("list")
    assert code == 0
    assert out == "toy     A toy (nowhere)\n        on one core: quick 30 s\ntiming  A clock (nowhere)\n"
    assert call("--version") == (0, f"intention {__version__}\n", "")


def test_the_real_experiments_are_listed():
    done = subprocess.run([sys.executable, "-m", "intention.lab", "list"], capture_output=True, text=True, check=True)
    for name in ("computations_2d", "layers", "scaling", "normalisation", "slowdown", "sine", "policy", "kabsch"):
        assert re.search(rf"^{name} +\w", done.stdout, re.MULTILINE)


def test_a_missing_extra_is_named():
    code = "import sys; sys.modules['tyro'] = None; from intention.lab.cli import main; sys.exit(main(['list']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: this command needs pip install 'intention[lab]'")
    assert "Traceback" not in done.stderr


def test_finished_runs_are_reused(call, tmp_path):
    args = ("run", "toy", "--log", tmp_path, "--no-tensorboard", "--out", "here")
    assert call(*args, "--seeds", 2)[0] == 0
    before = lines(Path("here/toy.jsonl"))
    code, out, _ = call(*args, "--seeds", 3, "--models", "line", "plane")
    assert code == 0
    assert "4 run(s) to do, 2 there already" in out
    assert sorted(lines(tmp_path / "ended")) == ["line0", "line1", "line2", "plane0", "plane1", "plane2"]
    assert lines(Path("here/toy.jsonl"))[:4] == before
    rows = read(Path("here/toy.jsonl"))
    assert len(rows) == 12
    assert {row.rows for row in rows} == {2}
    assert (tmp_path / "here" / "runs" / "toy" / rows[0].run / "checkpoint.safetensors").exists()
    call(*args, "--seeds", 1, "--steps", 6)  # another config is another run
    assert len(lines(tmp_path / "ended")) == 7


def test_a_run_of_which_a_row_is_missing_is_repeated(call, tmp_path):
    args = ("run", "toy", "--log", tmp_path, "--no-tensorboard", "--out", "here", "--seeds", 2)
    call(*args)
    whole = lines(Path("here/toy.jsonl"))
    Path("here/toy.jsonl").write_text("\n".join(whole[1:]))
    assert call(*args)[0] == 1  # its checkpoint is there
    assert call(*args, "--resume")[0] == 0
    assert lines(tmp_path / "ended") == ["line0", "line1", "line0"]
    assert Counter(row.run for row in read(Path("here/toy.jsonl"))).total() == 4
    assert [json.loads(line)["value"] for line in lines(Path("here/toy.jsonl"))[2:]] == [
        json.loads(line)["value"] for line in whole[:2]
    ]


def test_rows_say_which_preset_and_changed_ones_go_elsewhere(call):
    call("run", "toy", "--no-tensorboard", "--seeds", 1)
    call("run", "toy", "--no-tensorboard", "--seeds", 1, "--plane.width", 5, "--models", "line", "plane")
    assert {row.preset for row in read(Path("intention-results/quick/toy.jsonl"))} == {"quick"}
    rows = read(Path("intention-results/quick-changed/toy.jsonl"))
    # the line's run does not depend on the width of the plane
    assert {(row.model, row.preset) for row in rows} == {("line", "quick"), ("plane", "quick, changed")}
    assert {row.config["plane"]["width"] for row in rows} == {5}


def test_fresh_touches_only_its_runs(call, tmp_path):
    args = ("run", "toy", "--log", tmp_path, "--no-tensorboard", "--out", "here")
    call(*args, "--models", "line", "plane", "--seeds", 2)
    before = lines(Path("here/toy.jsonl"))
    other = [line for line in before if '"model": "plane"' in line or '"seed": 1' in line]
    folders = set(Path("here/runs/toy").iterdir())
    stamps = {path: path.stat().st_ctime_ns for path in folders}
    assert call(*args, "--seeds", 1, "--fresh")[0] == 0
    after = lines(Path("here/toy.jsonl"))
    assert after[:-2] == other
    assert len(after) == len(before)
    assert Counter(lines(tmp_path / "ended")) == {"line0": 2, "line1": 1, "plane0": 1, "plane1": 1}
    assert set(Path("here/runs/toy").iterdir()) == folders
    new = [path.name for path in folders if path.stat().st_ctime_ns != stamps[path]]
    assert [name[:10] for name in new] == ["line-seed0"]


def test_an_unfinished_run_asks_what_to_do(call, tmp_path, monkeypatch):
    args = ("run", "toy", "--log", tmp_path, "--no-tensorboard", "--out", "here", "--seeds", 2)
    call(*args)
    Path("here/toy.jsonl").unlink()
    code, _, err = call(*args)
    assert code == 1
    assert "2 unfinished run(s) have a checkpoint" in err
    assert "--resume" in err
    assert "--fresh" in err
    assert len(lines(tmp_path / "began")) == 2
    assert call(*args, "--fresh")[0] == 0
    assert len(lines(tmp_path / "ended")) == 4


def test_ctrl_c_saves_says_how_to_go_on_and_going_on_gives_the_same(call, tmp_path):
    args = ["run", "toy", "--out", "a b", "--seeds", "1", "--steps", "40", "--wait", "0.05", "--no-tensorboard"]
    process = start(*args, "--log", tmp_path, cwd=tmp_path)
    wait_for(lambda: len(lines(tmp_path / "stepped")) > 3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, out + err
    assert "Traceback" not in err
    again = shlex.split(err.rpartition("to go on: ")[2])
    assert again[:2] == ["intention", "run"]
    assert again[-1] == "--resume"
    assert not lines(tmp_path / "ended")
    folder = next(Path("a b/runs/toy").iterdir())
    assert (folder / "checkpoint.safetensors").exists()
    code, out, _ = call(*again[1:])
    assert code == 0
    assert "continues" in out
    call(*args[:2], "--out", "whole", *args[4:8])
    [resumed, _], [whole, _] = read(Path("a b/toy.jsonl")), read(Path("whole/toy.jsonl"))
    assert resumed.value == whole.value


def test_a_broken_line_is_reported_with_its_number_before_any_work(call, tmp_path):
    args = ("run", "toy", "--log", tmp_path, "--no-tensorboard", "--out", "here", "--seeds")
    call(*args, 2)
    with Path("here/toy.jsonl").open("a") as file:
        file.write('{"experiment": "toy", "ru\n')
    before = Path("here/toy.jsonl").read_text()
    for words in ((*args, 3), (*args, 3, "--fresh"), ("reproduce", "--out", "here"), ("report", "here")):
        code, _, err = call(*words)
        assert code == 1
        assert "toy.jsonl, line 5 is not a row" in err
    assert len(lines(tmp_path / "began")) == 2
    assert Path("here/toy.jsonl").read_text() == before


def test_a_folder_that_cannot_be_written_is_found_before_any_work(call, tmp_path, monkeypatch):
    Path("file").touch()
    args = ("toy", "--log", tmp_path, "--out")
    for words in (("run", *args, "file/inside"), ("sweep", *args, "file"), ("run", *args, "/proc/here")):
        code, _, err = call(*words)
        assert code == 1
        assert err.startswith("error: cannot w")
        assert "--out" in err

    def no_room(path, content):
        raise LabError(f"cannot write {path}: No space left on device")

    monkeypatch.setattr(runner, "write_whole", no_room)
    code, _, err = call("reproduce", "--out", "full")
    assert code == 1
    assert "No space left" in err
    assert not lines(tmp_path / "began")
    assert not list(Path("full").iterdir())


def test_two_at_a_time_do_not_share_a_folder(call):
    with runner.claimed(Path("here")):
        code, _, err = call("run", "toy", "--out", "here")
    assert code == 1
    assert "another `intention` works in here" in err


def test_a_full_disk_loses_no_row(call, tmp_path):
    """The third run's rows do not fit; the first two stay, whole."""
    args = ("run", "toy", "--numbers", 20000, "--no-tensorboard", "--out", "here", "--log", tmp_path)
    done = start("--largest-file", 300_000, *args, cwd=tmp_path)
    _, err = done.communicate(timeout=PATIENCE)
    assert done.returncode == 1
    assert err.startswith("error: cannot write")
    assert "File too large" in err
    assert "finished runs are not repeated" in err
    assert len(read(Path("here/toy.jsonl"))) == 4
    assert Path("here/toy.jsonl").read_text().endswith("}\n")
    assert call(*args, "--resume")[0] == 0
    assert lines(tmp_path / "ended") == ["line0", "line1", "line2", "line2"]
    assert len(read(Path("here/toy.jsonl"))) == 6


def test_under_torchrun_one_rank_prints_and_writes(call, tmp_path):
    args = ["run", "toy", "--out", "here", "--no-tensorboard", "--seeds"]
    call(*args, 1)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", toy_cli.__file__, *args, "2"]
    done = subprocess.run([sys.executable, *command], env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("1 run(s) to do, 1 there already") == 1
    assert done.stdout.count("rows are in") == 1
    assert [row.seed for row in read(Path("here/toy.jsonl"))] == [0, 0, 1, 1]


def test_a_failed_append_leaves_no_half_line(tmp_path):
    """What does not fit is written in part, and must be gone again after the file is closed."""
    code = """if True:
        import resource
        from pathlib import Path
        from intention.lab.core.files import append_lines
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, resource.RLIM_INFINITY))
        append_lines(Path("rows"), ["y" * 400, "z" * 400])
    """
    Path("rows").write_text("x" * 999 + "\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "LabError: cannot write rows: File too large" in done.stderr
    assert Path("rows").read_text() == "x" * 999 + "\n"


def test_a_run_that_measures_nothing_is_an_error(monkeypatch):
    [job, *_] = toy_experiment.jobs(toy_experiment.PRESETS["quick"])
    monkeypatch.setattr(toy_experiment, "run", lambda job, place: iter(()))
    with pytest.raises(LabError, match="measured nothing"):
        runner.perform(Task(job, toy_experiment, "quick", Path("out")), Place())
    monkeypatch.setattr(toy_experiment, "run", lambda job, place: iter([Measure("a", 1.0, x=3, model="other")]))
    [row] = runner.perform(Task(job, toy_experiment, "paper", Path("out")), Place())
    assert (row.model, row.x, row.preset, row.rows, row.intention) == ("other", 3, "paper, changed", 1, __version__)


def test_a_search_counts_only_its_own_runs_and_diverged_ones_have_no_score(call, monkeypatch):
    def work(index, task, notes):  # in this process: two errors that depend on rate and steps
        config = task.job.config
        rate = getattr(config, task.job.model).learning_rate
        measures = [Measure("mse", abs(rate - 0.001) + 1 / config.steps), Measure("mse", 4.0), Measure("other", 9.0)]
        monkeypatch.setattr(toy_experiment, "run", lambda job, place: iter(measures))
        return runner.perform(task, Place())

    monkeypatch.setattr(
        sweep, "sweep", lambda tasks, store, **_: [store(task, work(0, task, None)) for task in tasks] and []
    )
    words = ("sweep", "toy", "--search", "--models", "line", "plane", "--out", "here", "--steps")
    assert call(*words, 3)[0] == 0
    code, out, _ = call(*words, 40)
    assert code == 0
    scores = [line for line in out.splitlines() if "learning rate" in line]
    assert len(scores) == 2 * len(search.LEARNING_RATES)
    assert "line               learning rate 0.001: 0.3162  chosen" in scores  # sqrt(4 / 40), not mixed with 3 steps
    assert sum("chosen" in line for line in scores) == 2
    found = read(Path("here/searched/toy.jsonl"))
    assert [row.metric for row in found] == ["search"] * len(scores)

    def diverge(job, place):
        raise Diverged("the loss is nan")

    monkeypatch.setattr(toy_experiment, "run", diverge)
    [job, *_] = toy_experiment.jobs(toy_experiment.PRESETS["quick"])
    task = Task(job, toy_experiment, "quick", Path("out"), search=True)
    assert [row.value for row in runner.perform(task, Place())] == [None]
    with pytest.raises(Diverged):
        runner.perform(replace(task, search=False), Place())


def test_an_experiment_without_rates_cannot_be_searched(call):
    code, _, err = call("sweep", "timing", "--search")
    assert code == 2
    assert "no learning rate of their own" in err


def test_nothing_is_deleted_before_all_is_known_to_work(call, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "SECONDS", 1.0)
    args = ("toy", "--log", tmp_path, "--out", "here", "--seeds", 2)
    call("run", *args, "--no-tensorboard")
    before = Path("here/toy.jsonl").read_text(), sorted(Path("here/runs").rglob("*"))
    assert call("sweep", *args, "--fresh", "--cluster", "tcp://127.0.0.1:9")[0] == 1
    for name, words in {
        "safetensors": ("run", *args, "--no-tensorboard", "--fresh"),
        "tensorboard": ("run", *args, "--fresh"),
        "matplotlib": ("reproduce", "--out", "here", "--fresh"),
    }.items():
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            code, _, err = call(*words)
            assert code == 1
            assert "intention[lab]" in err
    assert (Path("here/toy.jsonl").read_text(), sorted(Path("here/runs").rglob("*"))) == before


def test_a_lock_that_is_a_link_empties_no_file(call, tmp_path):
    Path("here").mkdir()
    Path("precious").write_text("kept")
    Path("here/.lock").symlink_to(tmp_path / "precious")
    call("run", "toy", "--no-tensorboard", "--out", "here", "--seeds", 1)
    assert Path("precious").read_text() == "kept"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("seed", "zero"), ("preset", 5), ("experiment", ["a"]), ("run", ["a"]), ("rows", "x"), ("rows", None)),
        *(("interval", [1]), ("interval", ["a", "b"]), ("interval", "ab"), ("value", "1"), ("config", []), ("data", 3)),
    ],
)
def test_a_row_with_a_field_of_another_kind_is_reported(call, field, value):
    call("run", "toy", "--no-tensorboard", "--out", "here", "--seeds", 1)
    first, *others = lines(Path("here/toy.jsonl"))
    Path("here/toy.jsonl").write_text("\n".join([first, json.dumps(json.loads(first) | {field: value}), *others]))
    for words in (("report", "here"), ("run", "toy", "--no-tensorboard", "--out", "here")):
        code, _, err = call(*words)
        assert code == 1
        assert f"toy.jsonl, line 2 is not a row: {field} is" in err or "values to unpack" in err


def test_a_line_that_nests_too_deep_is_reported(call):
    assert call("run", "toy", "--no-tensorboard", "--out", "here", "--seeds", 1)[0] == 0
    with Path("here/toy.jsonl").open("a") as file:
        file.write("[" * 100_000 + "\n")
    assert "line 3 is not a row" in call("report", "here")[2]


def test_a_bug_shows_its_traceback(call):
    with pytest.raises(ZeroDivisionError):
        cli.main(["run", "toy", "--fails", "0", "--out", "here"])


def test_flags_of_the_real_configs_can_be_given():
    """A Config whose fields tyro cannot read would fail here."""
    for name in ("computations_2d", "layers", "scaling", "normalisation", "slowdown", "sine", "policy", "kabsch"):
        experiment = importlib.import_module(f"intention.lab.experiments.{name}")
        for preset in ("quick", "standard", "paper"):
            args = ("--preset", preset)
            _, config = options.parse_with_config(options.Run, f"run {name}", experiment, args)
            assert config == experiment.PRESETS[preset]
            assert commands._plan(experiment, config, preset, Path("out"))
