"""What each command does, between its flags and its exit code."""

from __future__ import annotations

import csv
import dataclasses
import difflib
import importlib
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from intention.lab import data, experiments
from intention.lab.cli import options, tables
from intention.lab.cli.options import Usage
from intention.lab.core import ranks, results
from intention.lab.core.device import find as find_device
from intention.lab.core.files import LabError
from intention.lab.core.place import Place
from intention.lab.experiments.base import PRESETS, Claim, Experiment, Job, score, tally
from intention.lab.run import cluster, runner, search
from intention.lab.run import sweep as sweeping
from intention.lab.run.progress import Display, Tally, duration
from intention.lab.run.runner import Task

__all__ = ["report", "reproduce", "run", "show_list", "sweep"]

RESULTS = Path("intention-results")


def show_list(args: list[str]) -> int:
    options.parse(options.List, "list", "The experiments, their places in the paper and their cost.", args)
    width = max(map(len, experiments.NAMES))
    for name in experiments.NAMES:
        experiment = experiments.find(name)
        print(f"{name:{width}}  {experiment.TITLE} ({experiment.PLACE})")
        known = {preset: runner.expected_seconds(experiment, preset) for preset in PRESETS}
        costs = [f"{preset} {duration(seconds)}" for preset, seconds in known.items() if seconds is not None]
        if costs:
            print(f"{'':{width}}  on one core: {', '.join(costs)}")
    return 0


def run(args: list[str]) -> int:
    name, rest = _name("run", args)
    experiment = experiments.find(name)
    flags, config = options.parse_with_config(options.Run, f"run {name}", experiment, rest)
    out = flags.out or _default_out(experiment, config, flags.preset)
    _check_data(config)
    find_device(flags.device)
    tasks = _plan(experiment, config, flags.preset, out, flags.tensorboard, device=flags.device)
    _need("safetensors", *(["tensorboard"] if flags.tensorboard else []))
    ranks.check_batch(getattr(config, "batch", None))
    torch.set_num_threads(flags.threads)
    with ExitStack() as stack:
        todo = _agree_on_work(stack, out, tasks, flags)
        _say(_count(tasks, todo, out))
        tally = Tally({task.id: task.weight for task in todo})
        with Display(tally, show=ranks.first()) as display:
            for task in todo:
                _run_here(task, display)
    _summarise(experiment, tasks, runner.rows_file(out, name))
    _say(f"rows are in {runner.rows_file(out, name)}; next: intention report {shlex.quote(str(out))}")
    return 0


def _summarise(experiment: Experiment, tasks: Sequence[Task], path: Path) -> None:
    """Some numbers, of each model over its seeds, and the finding."""
    if ranks.first():
        runs = {task.job.id for task in tasks}
        rows = [row for row in results.read(path) if row.run in runs]
        for line in [*tables.numbers(rows), experiment.finding(rows)]:
            if line:
                print(line)


def _run_here(task: Task, display: Display) -> None:
    def tell(step: int, steps: int, values: Mapping[str, float]) -> None:
        display.tally.note(task.id, step, steps, values.get("loss", float("nan")))

    if task.begun:
        display.say(f"{task.id}: continues")
    rows = runner.perform(task, Place(task.folder, tell, task.tensorboard, device=find_device(task.device)))
    if ranks.first():
        runner.store(task, rows)
    display.tally.end(task.id)
    display.say(f"{task.id}: done in {duration(rows[0].seconds)}")


def _agree_on_work(stack: ExitStack, out: Path, tasks: Sequence[Task], flags: options.Run) -> list[Task]:
    """What is to do, decided by the first rank before any work. It holds the folder until the stack is closed."""
    answer: list[str] | LabError = []
    if ranks.first():
        try:
            stack.enter_context(runner.claimed(out))
            todo = _to_do(tasks, flags.fresh)
            begun = [task for task in todo if task.begun]
            if begun and not flags.resume:
                raise LabError(
                    f"{len(begun)} unfinished run(s) have a checkpoint ({begun[0].folder}): give --resume to continue "
                    "or --fresh to delete all of these runs and start over"
                )
            answer = [task.id for task in todo]
        except LabError as error:
            answer = error
    answer = ranks.agree(answer)
    if isinstance(answer, LabError):
        raise answer
    return [task for task in tasks if task.id in set(answer)]


def sweep(args: list[str]) -> int:
    name, rest = _name("sweep", args)
    experiment = experiments.find(name)
    flags, config = options.parse_with_config(options.Sweep, f"sweep {name}", experiment, rest)
    _alone("sweep")
    out = flags.out or (RESULTS / "search" if flags.search else _default_out(experiment, config, flags.preset))
    _check_data(config)
    try:
        jobs = search.jobs(experiment, config) if flags.search else None
    except ValueError as error:
        raise Usage(str(error)) from error
    if flags.cluster is None:
        find_device(flags.device)  # now, not in every run
    tasks = _plan(experiment, config, flags.preset, out, flags.tensorboard, jobs, flags.device)
    failures = _sweep(tasks, out, flags)
    _say(f"rows are in {runner.rows_file(out, name)}")
    if flags.search:
        _tell_search(out, name, {task.job.id for task in tasks}, score(experiment))
    return _tell_failures(failures)


def _tell_search(out: Path, name: str, runs: set[str], metric: str) -> None:
    """The score of every model and rate, also as rows of the kind that the report shows."""
    found = search.distil([row for row in results.read(runner.rows_file(out, name)) if row.run in runs], metric)
    path = out / "searched" / f"{name}.jsonl"
    results.replace_all(path, found)
    for row in found:
        data = row.data or {}
        value = "not finite" if row.value is None else f"{row.value:.4g}"
        chosen = "  chosen" if data["chosen"] else ""
        print(f"{row.model:18s} learning rate {data['options']['learning_rate']:g}: {value}{chosen}")
    print(f"these scores are in {path}")


def _sweep(tasks: Sequence[Task], out: Path, flags: options.Sweep | options.Reproduce) -> list[sweeping.Failure]:
    _need("safetensors")
    if flags.cluster is not None:
        cluster.check(flags.cluster)  # before --fresh deletes anything
    with runner.claimed(out):
        todo = _to_do(tasks, flags.fresh)
        _say(_count(tasks, todo, out))
        # the longest first, so that all processes end at about the same time
        order = sorted(todo, key=lambda task: -task.weight)
        return sweeping.sweep(order, runner.store, jobs=flags.jobs, cluster=flags.cluster) if todo else []


def reproduce(args: list[str]) -> int:
    about = "All experiments with the sizes of a preset, and a report beside the paper's claims."
    flags = options.parse(options.Reproduce, "reproduce", about, args)
    _alone("reproduce")
    names = experiments.NAMES if flags.only is None else tuple(filter(None, flags.only.split(",")))
    for name in names:
        _check_name(name)
    if not names:
        raise Usage(f"--only names no experiment; there are {', '.join(experiments.NAMES)}")
    _need("matplotlib", "jinja2")
    out = flags.out or RESULTS / flags.preset
    found = [experiments.find(name) for name in experiments.NAMES]
    if flags.cluster is None:
        find_device(flags.device)
    presets = [(one, one.PRESETS[flags.preset]) for one in found]
    every = [task for one in presets for task in _plan(*one, flags.preset, out, device=flags.device)]
    failures = _sweep([task for task in every if task.job.experiment in names], out, flags)
    code = _tell_failures(failures)
    # of this preset only: the folder may hold rows of changed configs, too
    wanted = {(task.job.experiment, task.job.id) for task in every}
    rows = [row for row in results.read_folder(out) if (row.experiment, row.run) in wanted]
    return max(code, _write_report(out, rows))


def report(args: list[str]) -> int:
    flags = options.parse(options.Report, "report", "The report again, from the rows of a folder.", args)
    return _write_report(flags.folder, None)


def _write_report(folder: Path, rows: list[results.Row] | None) -> int:
    from intention.lab.report import write_report

    made = write_report(folder, rows)
    with (folder / "claims.csv").open(newline="", encoding="utf-8") as file:
        claims = list(csv.DictReader(file))
    for line in tables.winners(results.read_folder(folder) if rows is None else rows):
        print(line)
    for ours, title in (("paper", "claims of the paper"), ("ours", "lines of our own")):
        some = [Claim(line["claim"], line["where"], "", line["verdict"]) for line in claims if line["ours"] == ours]
        print(f"{title}: {', '.join(f'{count} {verdict}' for verdict, count in tally(some).items())}")
    for problem in made.problems:
        print(f"not shown in the report: {problem!r}", file=sys.stderr)
    sys.stderr.flush()
    print(made.path, flush=True)
    return 1 if made.problems else 0


def _to_do(tasks: Sequence[Task], fresh: bool) -> list[Task]:
    """The unfinished tasks; with fresh all of them, and what they left behind is deleted."""
    if fresh:
        runner.start_over(tasks)
        return list(tasks)
    todo = runner.unfinished(tasks)
    runner.drop_rows(todo)  # of runs of which only a part is there
    return todo


def _plan(
    experiment: Experiment,
    config: Any,
    preset: str,
    out: Path,
    tensorboard: bool = False,
    searched: Sequence[Job] | None = None,
    device: str = "cpu",
) -> list[Task]:
    options: Any = {"tensorboard": tensorboard, "searched": searched, "device": device}
    try:
        return runner.plan(experiment, config, preset, out, **options)
    except ValueError as error:
        raise Usage(str(error)) from error


def _default_out(experiment: Experiment, config: Any, preset: str) -> Path:
    """Runs of a preset go where `reproduce` finds them; others do not mix with them."""
    changed = [
        item.name
        for item in dataclasses.fields(config)
        if not item.metadata.get("chooses")
        and getattr(config, item.name) != getattr(experiment.PRESETS[preset], item.name)
    ]
    own = _own_data(config)
    name = re.sub(r"[^\w.+=-]", "_", Path(own).stem or "data") if own else ""
    return RESULTS / "-".join([preset, *([name] if own else []), *(["changed"] if changed else [])])


def _own_data(config: Any) -> str:
    """The path of the user's own images or features; "" where a known set is asked for, or none."""
    wanted = str(getattr(config, "data", "") or "")
    return "" if wanted in ("", "auto", *data.NAMES) else wanted


def _check_data(config: Any) -> None:
    """Data of the user that cannot be read are told before anything else."""
    if own := _own_data(config):
        data.load(own)


def _need(*modules: str) -> None:
    """Find out now, not after hours of work, that a part of the extra is missing."""
    for module in modules:
        importlib.import_module(module)


def _name(command: str, args: list[str]) -> tuple[str, list[str]]:
    """The experiment's name, which comes first, and the other arguments."""
    if args and args[0] in ("-h", "--help"):
        print(f"usage: intention {command} NAME [OPTIONS]\n\nNAME is one of {', '.join(experiments.NAMES)}.")
        print(f"`intention {command} NAME --help` shows the flags of an experiment.")
        raise SystemExit(0)
    if not args or args[0].startswith("-"):
        names = ", ".join(experiments.NAMES)
        raise Usage(f"`intention {command}` is followed by the name of an experiment: {names}")
    _check_name(args[0])
    return args[0], args[1:]


def _check_name(name: str) -> None:
    if name not in experiments.NAMES:
        close = difflib.get_close_matches(name, experiments.NAMES, 1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise Usage(f"there is no experiment {name!r}; {hint}There are {', '.join(experiments.NAMES)}")


def _alone(command: str) -> None:
    if ranks.count() > 1:
        raise Usage(f"`intention {command}` starts its own processes; under torchrun use `intention run NAME`")


def _count(tasks: Sequence[Task], todo: Sequence[Task], out: Path) -> str:
    there = len(tasks) - len(todo)
    seconds = sum(task.weight for task in todo)
    cost = f"; about {duration(seconds)} on one core" if todo and all(task.measured for task in todo) else ""
    return f"{len(todo)} run(s) to do, {there} there already, in {out}{cost}"


def _tell_failures(failures: Sequence[sweeping.Failure]) -> int:
    for failure in failures:
        print(f"failed: {failure.task.id}: {failure.error}", file=sys.stderr)
    if failures:
        print(f"error: {len(failures)} run(s) failed; the same command tries them again", file=sys.stderr)
    return 1 if failures else 0


def _say(text: str) -> None:
    if ranks.first():
        print(text, flush=True)
