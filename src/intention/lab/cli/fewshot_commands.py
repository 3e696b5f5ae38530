"""`intention fewshot` and `intention classify`: for images of your own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from intention.lab.cli import options
from intention.lab.cli.options import Switch, Usage
from intention.lab.core.files import LabError

if TYPE_CHECKING:
    from intention.lab.run.classify import Answer
    from intention.lab.run.study import Study

__all__ = ["Classify", "Fewshot", "classify", "fewshot"]

RESULTS = Path("intention-results")
Number = Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="(default: what the data allows)")]
Network = Annotated[str, tyro.conf.arg(metavar="B")]


@dataclass(frozen=True)
class Fewshot:
    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """A folder with a folder of images for each class; an .npz file and the name of a set work, too."""
    backbone: Network = "conv4"
    """What turns images into features: `conv4` (comes with the package), `efficientnet_lite0` (extra backbones) and all
    others of `intention embed --help`."""
    device: options.Device = "cpu"
    """Where images are embedded: auto (a GPU if there is one), cpu, cuda, cuda:N or mps. Heads stay on the CPU."""
    way: Number = None
    """Classes of an episode: 5, unless there are fewer."""
    shot: Number = None
    """Images of each class to learn from: 5, or half of the smallest class."""
    query: Number = None
    """Images of each class to ask about: 15, or what is left of the smallest class."""
    episodes: int = 600
    """Episodes of each head."""
    seed: int = 0
    """Of all draws."""
    out: Annotated[
        Path | None,
        tyro.conf.arg(metavar="FILE.html", help_behavior_hint="(default: intention-results/FOLDER.html)"),
    ] = None
    """Where the page goes."""


@dataclass(frozen=True)
class Classify:
    images: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGE")] = ()
    """Images without a label."""
    support: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """A folder with a folder of images for each class, to learn from."""
    model: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """In place of --support: what --save wrote."""
    backbone: Network = "conv4"
    """What turns images into features, as in `intention fewshot`."""
    device: options.Device = "cpu"
    """Where images are embedded: auto (a GPU if there is one), cpu, cuda, cuda:N or mps. Heads stay on the CPU."""
    save: Annotated[Path | None, tyro.conf.arg(metavar="FILE.safetensors")] = None
    """Keep what was learnt."""
    json: Switch = False
    """Print JSON."""
    force: Switch = False
    """Overwrite the file of --save if it is there."""


def fewshot(args: list[str]) -> int:
    """`intention fewshot FOLDER`"""
    about = "How well a few images of each class tell the others apart: every head on your data, and a page about it."
    flags = options.parse(Fewshot, "fewshot", about, args)
    out = flags.out or RESULTS / f"{Path(flags.data).expanduser().resolve().stem}.html"
    if out.suffix != ".html":
        raise Usage(f"--out is the name of an .html file, got {out}")
    from intention.lab.report.study import write_page
    from intention.lab.run.own import gather
    from intention.lab.run.study import study

    own = gather(flags.data, flags.backbone, flags.device)
    found = study(own, flags.way, flags.shot, flags.query, flags.episodes, flags.seed)
    _show(found)
    write_page(out, found)
    print(f"episodes, confusions and {len(found.suspects)} labels to look at: {out}")
    return 0


def _show(found: Study) -> None:
    from rich.console import Console
    from rich.table import Table

    print(f"{len(found.own.y)} images of {len(found.own.classes)} classes, {found.own.backbone}: {found.sizes}")
    for note in found.notes:
        print(note)
    table = Table("head", box=None, pad_edge=False)
    for name in ("accuracy", "± 95%", "behind", "seconds"):
        table.add_column(name, justify="right")
    table.add_column("")
    for line in found.lines:
        best = line is found.lines[0]
        less, half = line.behind
        cells = (f"{100 * line.found.accuracy:.1f}%", f"{100 * line.found.interval:.1f}")
        behind = "" if best else f"{100 * less:.1f} ± {100 * half:.1f}"
        mark = "best" if best else "not clearly worse" if less <= half else ""
        table.add_row(line.name, *cells, behind, f"{line.seconds:.1f}", mark, style="bold" if best else None)
    Console(markup=False, highlight=False).print(table)


def classify(args: list[str]) -> int:
    """`intention classify --support FOLDER IMAGE...`"""
    about = "The label of each image, its probability, and the support images that decided it."
    flags = options.parse(Classify, "classify", about, args)
    if (flags.support is None) == (flags.model is None):
        raise Usage("give --support FOLDER, to learn from, or --model FILE, which --save wrote: one of the two")
    if not flags.images and flags.save is None:
        raise Usage("give images to classify, or --save FILE to keep what is learnt")
    if flags.save is not None and flags.save.exists() and not flags.force:
        raise LabError(f"{flags.save} is there already; give --force to overwrite it, or another --save")
    from intention.lab.run import classify as run

    run.check_images(flags.images)
    if flags.support is not None:
        known = run.learn(flags.support, flags.backbone, flags.images, flags.device)
    else:
        assert flags.model is not None
        known = run.load(flags.model, flags.device)
    if flags.save is not None:
        run.save(known, flags.save)
    answers = run.answer(known, flags.images) if flags.images else []
    if flags.json:
        print(json.dumps([_as_json(one) for one in answers], indent=2, ensure_ascii=False))
    else:
        _show_answers(answers)
        if flags.save is not None:
            print(f"what was learnt is in {flags.save}; next: intention classify --model {flags.save} IMAGE...")
    return 0


def _as_json(one: Answer) -> dict[str, object]:
    decided = [{"image": file, "label": label, "influence": share} for file, label, share in one.decided_by]
    return {**one._asdict(), "image": str(one.image), "decided_by": decided}


def _show_answers(answers: list[Answer]) -> None:
    from rich.console import Console
    from rich.table import Table

    if not answers:
        return
    table = Table("image", "label", box=None, pad_edge=False)
    table.add_column("probability", justify="right")
    table.add_column("decided by")
    for one in answers:
        decided = ", ".join("/".join(Path(file).parts[-2:]) for file, _, _ in one.decided_by)
        table.add_row(str(one.image), one.label, f"{100 * one.probability:.0f}%", decided)
    Console(markup=False, highlight=False).print(table)  # names may have brackets
