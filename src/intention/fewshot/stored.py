"""The file of a classifier: read, and looked at before anything is made of it."""

from __future__ import annotations

import json
import math
from os import PathLike, fspath

from torch import Tensor

from intention.context import Context
from intention.fewshot.heads import Kernel, LsSvm
from intention.kernels import KINDS

__all__ = ["head_of", "read", "write"]

FORMAT = 1


def write(path: str | PathLike[str], state: dict[str, Tensor], told: dict, beside: dict[str, str]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(state, fspath(path), {**beside, "fewshot": json.dumps({"format": FORMAT, **told})})
    except SafetensorError as error:
        raise OSError(f"cannot write {fspath(path)}: {error}; choose another place") from error


def read(path: str | PathLike[str]) -> tuple[dict, Context, dict[str, str]]:
    """What a file of `FewShotClassifier.save` tells: of the classifier, its fit, and what was kept beside it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(fspath(path), framework="pt") as file:
            beside = dict(file.metadata() or {})
            told = json.loads(beside.pop("fewshot"))
            names: list[str] = list(file.keys())
            state = {name: file.get_tensor(name) for name in names}
        if told["format"] != FORMAT:
            raise ValueError(f"its format is {told['format']}, this version reads {FORMAT}")
        context = Context.from_state_dict(state)
        _check(told, context)
        return told, context, beside
    except OSError as error:
        raise FileNotFoundError(f"cannot read the classifier {fspath(path)}: {error}") from error
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{fspath(path)} is not a classifier of ours ({error}); FewShotClassifier.save writes one"
        ) from error


def _check(told: dict, context: Context) -> None:
    classes = told["classes"]
    named = isinstance(classes, list) and all(isinstance(name, str | int) for name in classes)
    if not named or len(set(classes)) != len(classes):
        raise ValueError(f"its classes are {classes!r}, not different names")
    if context.key is None or context.value is None or context.value.dim() != 2:
        raise ValueError("it has no examples")
    if context.value.shape[-1] != len(classes):
        raise ValueError(f"it has {len(classes)} names for {context.value.shape[-1]} classes")
    if not 0 < float(told["temperature"]) < math.inf:
        raise ValueError(f"its temperature is {told['temperature']}")
    for name, kind in (("backbone", str), ("features", bool), ("normalise", bool), ("search", bool)):
        if not isinstance(told[name], kind):
            raise ValueError(f"its {name} is {told[name]!r}")


def head_of(told: dict, context: Context) -> LsSvm:
    """A head that fits as the one before: with its kernel, whose width stays what was found, and its alpha."""
    alpha = "loo" if told["search"] else float(context.alpha)
    if context.kernel is None:
        return LsSvm(alpha)
    width = {} if context.kernel.gamma is None else {"gamma": context.kernel.gamma}
    return Kernel(KINDS[context.kernel.name](**context.kernel.kernel.settings(), **width), alpha)
