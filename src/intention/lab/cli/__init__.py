"""`intention ...`: experiments (list, run, sweep, reproduce, report), images (data, embed, fewshot, classify), play."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence

from intention import __version__
from intention.lab.core import ranks
from intention.lab.core.files import LabError

__all__ = ["main"]

ABOUT = f"""usage: intention COMMAND ...

The experiments of the paper.

  intention list                 what there is
  intention reproduce            all experiments, then one report
  intention run NAME             one experiment, in this process
  intention sweep NAME           one experiment, over processes or a cluster
  intention report DIR           the report again, from the rows of a folder
  intention data list            data sets: list, fetch NAME, info NAME_OR_PATH
  intention embed DATA           features of images, once
  intention play                 KVQ space in the browser (extra: play)

Images of your own: a folder with one folder for each class.

  intention fewshot FOLDER       how well a few images tell the others apart, and which labels look wrong
  intention classify IMAGE...    labels from a few labelled images (--support FOLDER)

For example:

  intention run computations_2d                    the paper's Figure 4, in a second
  intention reproduce --only kabsch,in_context     two experiments, and a report
  intention embed photos --out photos.npz          your own images: a folder for each class

`intention COMMAND --help` and `intention run NAME --help` show the flags. Version {__version__}.
"""
EXTRA = {"jinja2", "joblib", "markupsafe", "matplotlib", "numpy", "rich", "safetensors", "tensorboard", "tyro"}
EXTRA |= {"PIL", "pooch", "requests"}
PLAY = {"starlette", "uvicorn"}  # what the extra `play` has besides


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. 0: done, 1: an error or failed runs, 2: a command that cannot be meant, 130: stopped by Ctrl-C."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(args)
    except LabError as error:
        return _complain(str(error), 1)
    except ImportError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in EXTRA | PLAY:
            raise
        extra = "play" if missing in PLAY else "lab"
        return _complain(f"this command needs pip install 'intention[{extra}]' ({error})", 1)
    except KeyboardInterrupt:
        _tell_how_to_resume(args)
        return 130
    finally:
        ranks.leave()
        if argv is None:
            _end_workers()


def _end_workers() -> None:
    """Idle worker processes take seconds to leave torch; nothing that they hold is needed."""
    loky = sys.modules.get("joblib.externals.loky")
    if loky is not None:
        loky.get_reusable_executor(reuse=True).shutdown(wait=True, kill_workers=True)


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(ABOUT, end="")
        return 0 if args else 2
    if args[0] == "--version":
        print(f"intention {__version__}")
        return 0
    from intention.lab.cli import commands, data_commands, fewshot_commands
    from intention.lab.cli.options import Usage

    known: dict[str, Callable[[list[str]], int]] = {
        "list": commands.show_list,
        "run": commands.run,
        "sweep": commands.sweep,
        "reproduce": commands.reproduce,
        "report": commands.report,
        "data": data_commands.show,
        "embed": data_commands.embed,
        "fewshot": fewshot_commands.fewshot,
        "classify": fewshot_commands.classify,
        "play": _play,
    }
    try:
        if args[0] not in known:
            raise Usage(f"there is no command {args[0]!r}; there are {', '.join(known)}")
        return known[args[0]](args[1:])
    except Usage as error:
        return _complain(str(error), 2)


def _play(args: list[str]) -> int:
    from intention.lab.cli import options
    from intention.play import command

    return command.play(options.parse(command.Flags, "play", command.ABOUT, args))


def _complain(text: str, code: int) -> int:
    """On each rank, since it may be the only one that knows; wrong flags are told once."""
    if ranks.first() or code != 2:
        rank = "" if ranks.first() else " of another rank"
        print(f"error{rank}: {text}", file=sys.stderr)
    return code


def _tell_how_to_resume(args: list[str]) -> None:
    if not ranks.first():
        return
    again = [word for word in args if word not in ("--fresh", "--resume", "--no-resume")]
    again += ["--resume"] if args[0] == "run" else []
    how = "the same torchrun command, with: " if ranks.count() > 1 else ""
    print(f"\nstopped; to go on: {how}{shlex.join(['intention', *again])}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
