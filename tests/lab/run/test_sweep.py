"""Many runs at once: failures, killed workers, a cluster, and all experiments together."""

import itertools
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from intention.lab.core.files import LabError
from intention.lab.core.results import read, select
from intention.lab.run import cluster, progress, sweep
from intention.lab.run.progress import Display, Tally, duration
from lab import toy_experiment, toy_timing
from lab.toy_cli import ENVIRONMENT, PATIENCE, lines, start, wait_for

pytestmark = pytest.mark.usefixtures("toys")

NONE = "{} holds, 0 holds in some cases, 0 does not hold, 0 not decided, 0 not tested at this size"


def rows_of(path):
    """How many rows each seed has: two when all is well."""
    return dict(Counter(row.seed for row in read(Path(path))))


def test_failures_are_listed_and_cost_only_their_runs(call, tmp_path):
    args = ("sweep", "toy", "--log", tmp_path, "--out", "here", "--seeds", 4, "--jobs", 2)
    code, out, err = call(*args, "--fails", 1, 3)
    assert code == 1
    failed = [line for line in err.splitlines() if line.startswith("failed: ")]
    assert len(failed) == 2
    assert all("ZeroDivisionError: a bug (the traceback is in " in line for line in failed)
    assert "error: 2 run(s) failed" in err
    assert rows_of("here/toy.jsonl") == {0: 2, 2: 2}
    assert {row.value for row in select(read(Path("here/toy.jsonl")), metric="threads")} == {1}
    trace = failed[0].rpartition("is in ")[2].rstrip(")")
    assert "raise ZeroDivisionError" in Path(trace).read_text()
    code, out, _ = call(*args)
    assert code == 0
    assert "2 run(s) to do, 2 there already" in out
    assert Counter(lines(tmp_path / "ended")) == {f"line{seed}": 1 for seed in range(4)}
    assert rows_of("here/toy.jsonl") == dict.fromkeys(range(4), 2)


def test_a_killed_worker_costs_only_its_run(call, tmp_path):
    code, _, err = call("sweep", "toy", "--log", tmp_path, "--out", "here", "--seeds", 6, "--dies", 3, "--jobs", 2)
    assert (code, err) == (0, "")
    assert (tmp_path / "died3").exists()
    assert rows_of("here/toy.jsonl") == dict.fromkeys(range(6), 2)
    assert Counter(lines(tmp_path / "ended")) == {f"line{seed}": 1 for seed in range(6)}
    began = Counter(lines(tmp_path / "began"))
    assert began["line3"] == 2
    assert began.total() <= 8  # the killed run, and one that was at work beside it


def test_a_run_that_always_kills_its_worker_fails_alone(call, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "STRIKES", 1)
    args = ("sweep", "toy", "--log", tmp_path, "--out", "here", "--seeds", 4, "--dies", 0, "--always", "--jobs", 1)
    code, _, err = call(*args)
    assert code == 1
    assert "its worker process was killed again and again" in err
    assert "error: 1 run(s) failed" in err
    assert rows_of("here/toy.jsonl") == {1: 2, 2: 2, 3: 2}


def test_ctrl_c_in_a_sweep_saves_and_the_same_command_goes_on(call, tmp_path):
    args = ["sweep", "toy", "--out", "here", "--seeds", "3", "--steps", "60", "--wait", "0.5", "--jobs", "2"]
    process = start(*args, "--log", tmp_path, cwd=tmp_path)
    wait_for(lambda: {"line0", "line1"} <= set(lines(tmp_path / "stepped")))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, out + err
    assert "Traceback" not in err
    assert f"to go on: intention {' '.join(args)}" in err
    assert set(lines(tmp_path / "began")) == {"line0", "line1"}
    assert not lines(tmp_path / "ended")
    assert len(list(Path("here/runs/toy").glob("*/checkpoint.safetensors"))) == 2
    assert call(*args[:8], "--jobs", 2)[0] == 0
    assert call("run", *args[1:3], "whole", *args[4:8], "--no-tensorboard")[0] == 0
    resumed, whole = (select(read(Path(f"{name}/toy.jsonl")), metric="weight") for name in ("here", "whole"))
    assert {row.seed: row.value for row in resumed} == {row.seed: row.value for row in whole}


def test_when_the_parent_is_killed_its_workers_save_and_end(tmp_path):
    args = ("sweep", "toy", "--out", "here", "--seeds", 2, "--steps", 4000, "--wait", 0.05, "--jobs", 2)
    process = start(*args, "--log", tmp_path, cwd=tmp_path)
    wait_for(lambda: {"line0", "line1"} <= set(lines(tmp_path / "stepped")))
    process.kill()
    process.communicate(timeout=PATIENCE)  # the workers hold its pipes: it returns when they have ended
    assert len(list(Path("here/runs/toy").glob("*/checkpoint.safetensors"))) == 2
    assert len(lines(tmp_path / "stepped")) < 2000


def test_reproduce_runs_all_then_nothing(call, tmp_path, monkeypatch):
    monkeypatch.setitem(toy_experiment.PRESETS, "quick", replace(toy_experiment.Config(), log=str(tmp_path)))
    monkeypatch.setitem(toy_timing.PRESETS, "quick", toy_timing.Config(log=str(tmp_path)))
    code, out, err = call("reproduce", "--jobs", 2)
    assert (code, err) == (0, "")
    *_, verdicts, path = out.splitlines()
    assert path == "intention-results/quick/report.html"
    assert verdicts == f"lines of our own: {NONE.format(0)}"
    assert "A toy" in Path(path).read_text()
    times = sorted([float(time) for time in line.split()] for line in lines(tmp_path / "times"))
    assert len(times) == 5
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(times))  # one after the other
    assert (tmp_path / "times").stat().st_mtime < (tmp_path / "began").stat().st_mtime
    Path(path).unlink()
    before = time.perf_counter()
    monkeypatch.setattr(sweep, "sweep", None)  # is not called
    code, out, _ = call("reproduce")
    assert time.perf_counter() - before < 5
    assert code == 0
    assert "0 run(s) to do, 8 there already" in out
    assert out.splitlines()[-1] == path
    assert Path(path).exists()
    assert len(lines(tmp_path / "ended")) == 3


def test_reproduce_reports_what_there_is_when_runs_fail(call, monkeypatch):
    monkeypatch.setitem(toy_experiment.PRESETS, "standard", replace(toy_experiment.Config(), fails=(1,)))
    code, out, err = call("reproduce", "--preset", "standard", "--only", "toy", "--jobs", 2, "--out", "here")
    assert code == 1
    assert "failed: toy/line-seed1" in err
    assert out.splitlines()[-1] == "here/report.html"
    assert "A toy" in Path("here/report.html").read_text()
    assert not Path("here/timing.jsonl").exists()


def test_reproduce_does_not_report_changed_configs(call):
    call("run", "toy", "--out", "here", "--no-tensorboard")
    call("run", "toy", "--out", "here", "--no-tensorboard", "--steps", 7, "--seeds", 4)
    assert call("reproduce", "--out", "here", "--only", "toy")[0] == 0
    assert len(lines(Path("here/rows.csv"))) == 1 + 3 * 2
    assert call("report", "here")[:2] == (
        0,
        f"claims of the paper: {NONE.format(1)}\nlines of our own: {NONE.format(0)}\nhere/report.html\n",
    )
    code, _, err = call("report", "nowhere")
    assert code == 1
    assert "there is no folder nowhere" in err


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A cluster of two workers on this machine, which gives a run up when it has killed two of them."""
    folder = tmp_path_factory.mktemp("dask")
    settings = {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "1", "DASK_TEMPORARY_DIRECTORY": str(folder)}
    options = {"env": {**ENVIRONMENT, **settings}, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    file = folder / "scheduler.json"
    host = ["--host", "127.0.0.1", "--no-dashboard", "--scheduler-file", str(file)]
    dask = [sys.executable, "-m", "dask"]
    processes = [subprocess.Popen([*dask, "scheduler", "--port", "0", *host], **options)]
    worker = [*dask, "worker", *host, "--nthreads", "1", "--nworkers", "1", "--death-timeout", "60"]
    try:
        processes += [subprocess.Popen(worker, **options) for _ in range(2)]
        wait_for(lambda: file.exists() and file.read_text().strip().endswith("}"))
        yield json.loads(file.read_text())["address"]
    finally:
        for process in reversed(processes):  # workers first: theirs are children of theirs, which they end
            process.terminate()
            process.wait(30)


def test_a_cluster_with_a_killed_worker_gives_all_rows(call, tmp_path, address, monkeypatch):
    monkeypatch.setattr(cluster, "SECONDS", 60.0)  # the workers may not be up yet
    args = ("sweep", "toy", "--log", tmp_path, "--out", "here", "--cluster", address, "--wait", 0.02)
    code, _, err = call(*args, "--seeds", 5, "--dies", 1)
    assert (code, err) == (0, "")
    assert (tmp_path / "died1").exists()
    assert rows_of("here/toy.jsonl") == dict.fromkeys(range(5), 2)
    assert call(*args, "--seeds", 5)[1].startswith("0 run(s) to do, 5 there")
    # a run that kills every worker is given up, and the others are not
    code, _, err = call(*args, "--seeds", 7, "--dies", 6, "--always")
    assert code == 1
    assert err.startswith("failed: toy/line-seed6")
    assert "KilledWorker" in err
    assert rows_of("here/toy.jsonl") == dict.fromkeys(range(6), 2)


def test_a_cluster_that_is_not_there_is_told_at_once(call, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "SECONDS", 1.0)
    for address in ("tcp://127.0.0.1:9", "nonsense://1", "127.0.0.1"):
        before = time.perf_counter()
        code, _, err = call("sweep", "toy", "--log", tmp_path, "--out", "here", "--cluster", address)
        assert time.perf_counter() - before < 10
        assert code == 1
        assert f"error: no dask scheduler answers at {address}" in err
    monkeypatch.setitem(sys.modules, "distributed", None)
    code, _, err = call("sweep", "toy", "--log", tmp_path, "--out", "here", "--cluster", "tcp://127.0.0.1:9")
    assert (code, err) == (1, "error: --cluster needs pip install 'intention[cluster]'\n")
    assert not lines(tmp_path / "began")


class Cluster:
    """A client of a cluster with these workers."""

    def __init__(self, threads):
        self.threads = threads

    def wait_for_workers(self, count, timeout):
        if len(self.threads) < count:
            raise TimeoutError

    def nthreads(self):
        return self.threads


def test_workers_of_a_cluster_have_one_thread():
    cluster._check_workers(Cluster({"a": 1, "b": 1}), "tcp://x")
    with pytest.raises(LabError, match="has no workers"):
        cluster._check_workers(Cluster({}), "tcp://x")
    with pytest.raises(LabError, match=r"more than one thread \(b\).*--nthreads 1"):
        cluster._check_workers(Cluster({"a": 1, "b": 2}), "tcp://x")


def test_time_left_counts_what_was_done_before_the_start(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    tally = Tally({"a": 3.0, "b": 1.0})
    assert tally.left() is None
    tally.note("a", 51, 100, 0.5, 50)  # resumed
    now[0] = 110.0
    tally.note("a", 60, 100, 0.25)
    assert tally.done() == pytest.approx(0.45)
    assert tally.left() == pytest.approx(10 * 0.55 / 0.075)
    assert str(tally) == "0 of 2 runs, step 60 of 100, loss 0.25, 0.9 steps/s, 1 min 13 s left"
    tally.end("a")
    tally.note("a", 99, 100, 0.1)  # comes too late
    assert tally.done() == 0.75
    assert str(tally) == "1 of 2 runs, 7 s left"
    assert duration(7200) == "2 h 0 min"


def test_plain_lines_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr(progress, "PLAIN_EVERY", 0.05)
    tally = Tally({"a": 1.0})
    with Display(tally):
        tally.note("a", 3, 12, 0.125)
        time.sleep(0.4)
    shown = capsys.readouterr().out.splitlines()
    assert 2 <= len(shown) <= 8
    assert shown[-1] == " 25%  0 of 1 runs, step 3 of 12, loss 0.125"
    with Display(tally, show=False) as display:
        display.say("nothing")
        time.sleep(0.2)
    assert capsys.readouterr().out == ""
