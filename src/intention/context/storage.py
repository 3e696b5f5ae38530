"""A context as plain tensors, and as a safetensors file: no code is stored, so none is run on loading."""

from __future__ import annotations

import json
from collections.abc import Callable
from os import PathLike, fspath
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor

from intention.context.points import Sums
from intention.context.solved import Solved
from intention.features import Features, restore_features
from intention.kernels import BoundKernel
from intention.kernels import restore as restore_kernel
from intention.solve.constraints.constrained import Constraint

__all__ = ["load", "restored", "save", "state_dict"]

T = TypeVar("T")
FORMAT = 1
POINTS = ("key", "value", "weight")
DTYPES = {str(x).removeprefix("torch."): x for x in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}


def state_dict(fit: Solved) -> dict[str, Tensor]:
    """Tensors by name; what is not a tensor is JSON in the bytes of "meta"."""
    if not isinstance(fit.covariance, str):
        raise ValueError("a context with a callable covariance cannot be stored: its code is not part of the state")
    if not isinstance(fit.features, Features | None):
        raise ValueError("a context with callable features cannot be stored: their code is not part of the state")
    meta: dict[str, object] = {
        "format": FORMAT,
        "dtype": str(fit.dtype).removeprefix("torch."),
        "intercept": fit.intercept,
        "covariance": fit.covariance,
        "kinds": [c.kind for c in fit.constraints],
    }
    tensors = dict(zip(POINTS, fit.points or (None, None, None), strict=True))
    state = {name: x for name, x in tensors.items() if x is not None} | {"alpha": fit.alpha}
    if fit.stats is not None:
        state |= {f"stats.{name}": x for name, x in fit.stats._asdict().items()}
    for i, constraint in enumerate(fit.constraints):
        state |= {f"constraint.{i}.normal": constraint.normal, f"constraint.{i}.bound": constraint.bound}
    for part, chosen in (("kernel", fit.kernel), ("features", fit.features)):
        if chosen is not None:
            state |= {f"{part}.{name}": x for name, x in chosen.state().items()}
            meta[part] = {"name": chosen.name, "settings": chosen.settings()}
    meta["tensors"] = sorted(state)
    state["meta"] = torch.tensor(list(json.dumps(meta).encode()), dtype=torch.uint8)
    # fresh memory: tensors that share some cannot be written, and rounding may depend on how memory is aligned
    return {name: x.detach().clone(memory_format=torch.contiguous_format) for name, x in state.items()}


def restored(state: dict[str, Tensor], make: Callable[..., T]) -> T:
    """`make`, a Context, of the fields that `state_dict` described."""
    try:
        meta = json.loads(bytes(state["meta"].tolist()))
        found = meta["format"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"this is not the state of a Context, it has no readable 'meta': {error!r}") from error
    if found != FORMAT:
        raise ValueError(f"the state has format {found}, this version reads {FORMAT}; use the version that wrote it")

    def under(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)}

    try:
        if missing := set(meta["tensors"]) - set(state):
            raise KeyError(*sorted(missing))
        sums = under("stats.")
        maps: dict[str, BoundKernel | Features] = {}
        for part, restore in (("kernel", restore_kernel), ("features", restore_features)):
            if (told := meta.get(part)) is not None:
                maps[part] = restore(told["name"], told["settings"], under(f"{part}."))
        return make(
            **{name: state.get(name) for name in POINTS},
            kernel=maps.get("kernel"),
            features=maps.get("features"),
            alpha=state["alpha"],
            stats=Sums(**sums) if sums else None,
            fits_intercept=meta["intercept"],
            covariance=meta["covariance"],
            dtype=DTYPES[meta["dtype"]],
            constraints=tuple(
                Constraint(state[f"constraint.{i}.normal"], state[f"constraint.{i}.bound"], kind)
                for i, kind in enumerate(meta["kinds"])
            ),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"this is not the whole state of a Context: {error!r}; make one with ctx.state_dict()"
        ) from error


def save(state: dict[str, Tensor], path: str | PathLike) -> None:
    _safetensors().save_file(state, fspath(path))


def load(path: str | PathLike, device: str) -> dict[str, Tensor]:
    name = fspath(path)
    try:
        state = _safetensors().load_file(name, device)
    except OSError:
        raise
    except Exception as error:  # safetensors raises its own class, which needs safetensors to name
        raise ValueError(f"{name} is not a whole safetensors file: {error}") from error
    return {key: x.clone() for key, x in state.items()}


def _safetensors() -> ModuleType:
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError(
            "saving and loading need the package safetensors: pip install safetensors; or put "
            "ctx.state_dict() where your other tensors go"
        ) from None
    return safetensors.torch
