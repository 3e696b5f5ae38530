"""One scene's picture and the lines of Python that compute it, as files; and the links that say which scene."""

from __future__ import annotations

import io
from pathlib import Path

from intention.lab.core.files import write_whole
from intention.lab.report.figures import standalone, to_svg
from intention.play import fields
from intention.play.fields import State, Wrong
from intention.play.scenes import SCENES, Scene

__all__ = ["fragment", "parse_link", "write"]

FIRST = "map"


def parse_link(link: str) -> tuple[Scene, State]:
    """The scene and state of `line`, `#line?alpha=-2` or a whole address; "" is the first scene.

    >>> scene, state = parse_link("#line?alpha=-2&points=0.5_1;0.7_1.2")
    >>> scene.name, state["alpha"], state["points"]
    ('line', -2.0, [(0.5, 1.0), (0.7, 1.2)])
    """
    name, _, rest = fragment(link).removeprefix("#").partition("?")
    name = name or FIRST
    if name not in SCENES:
        raise Wrong(f"there is no scene {name!r}; there are {', '.join(SCENES)}")
    return SCENES[name], fields.parse(SCENES[name].fields, rest)


def fragment(link: str) -> str:
    """The part of an address that says what is shown, from # on; "" where it says nothing."""
    if "#" in link:
        return link[link.index("#") :]
    return "" if not link or "://" in link else f"#{link}"


def write(folder: Path, scene: Scene, state: State) -> list[Path]:
    """NAME.svg, NAME.png and NAME.py."""
    answered = scene.compute(state)
    svg = standalone(to_svg(lambda: scene.draw(state, answered), scene.name, scene.title))
    png = io.BytesIO()
    scene.draw(state, answered).savefig(png, format="png", dpi=200)
    written = {"svg": svg, "png": png.getvalue(), "py": scene.code(state).encode()}
    paths = [folder / f"{scene.name}.{kind}" for kind in written]
    for path, content in zip(paths, written.values(), strict=True):
        write_whole(path, content)
    return paths
