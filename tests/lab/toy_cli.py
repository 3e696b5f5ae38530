"""`intention` with the toys in place of the experiments, and how tests start it."""

import importlib
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from intention.lab import cli, experiments

TOYS = {"toy": "lab.toy_experiment", "timing": "lab.toy_timing"}
SEARCHED = filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(SEARCHED), "COLUMNS": "100"}
# Seconds until a process counts as hanging, below the limit of a whole test: importing torch can take a minute on a
# machine that is busy with other things.
PATIENCE = 240


def install(setattr_=setattr):
    setattr_(experiments, "NAMES", tuple(TOYS))
    setattr_(experiments, "find", lambda name: importlib.import_module(TOYS[name]))


def start(*words, **options):
    """This file, as a process of its own."""
    command = [sys.executable, __file__, *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=ENVIRONMENT, **pipes, **options)


def wait_for(condition, seconds=PATIENCE):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def lines(path):
    return path.read_text().splitlines() if path.exists() else []


if __name__ == "__main__":
    install()
    if sys.argv[1] == "--largest-file":  # a disk that is full at this size
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
        del sys.argv[1:3]
    sys.exit(cli.main())
