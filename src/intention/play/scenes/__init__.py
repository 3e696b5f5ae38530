"""The scenes by name."""

from __future__ import annotations

from intention.play.scenes import classes, line, map, pixels, plane, rabbit, sine, stream
from intention.play.scenes.base import Scene

__all__ = ["SCENES", "Scene"]

SCENES: dict[str, Scene] = {
    module.SCENE.name: module.SCENE for module in (map, line, plane, sine, rabbit, pixels, classes, stream)
}
