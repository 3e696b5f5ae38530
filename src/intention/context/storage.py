"""A context as plain tensors, and as a safetensors file: no code is stored, so none is run on loading."""

from __future__ import annotations

import json
from os import PathLike, fspath
from typing import Any

import torch
from torch import Tensor

from intention.context.sums import Sums
from intention.features import Features, restore_features
from intention.kernels import restore
from intention.solve.constraints.constrained import Constraint

FORMAT = 1
TENSORS = ("key", "value", "weight", "alpha")
DTYPES = {str(x).removeprefix("torch."): x for x in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}


def state_dict(context: Any) -> dict[str, Tensor]:
    """Tensors by name; what is not a tensor is JSON in the bytes of "meta"."""
    if not isinstance(context.covariance, str):
        raise ValueError("a context with a callable covariance cannot be stored: its code is not part of the state")
    state = {name: getattr(context, name) for name in TENSORS if getattr(context, name) is not None}
    meta: dict[str, Any] = {
        "format": FORMAT,
        "dtype": str(context.dtype).removeprefix("torch."),
        "intercept": context.fits_intercept,
        "covariance": context.covariance,
        "kinds": [c.kind for c in context.constraints],
    }
    if context.stats is not None:
        state |= {f"stats.{name}": x for name, x in context.stats._asdict().items()}
    for i, constraint in enumerate(context.constraints):
        state |= {f"constraint.{i}.normal": constraint.normal, f"constraint.{i}.bound": constraint.bound}
    for part in ("kernel", "features"):
        chosen = getattr(context, part)
        if chosen is None:
            continue
        if part == "features" and not isinstance(chosen, Features):
            raise ValueError("a context with callable features cannot be stored: their code is not part of the state")
        state |= {f"{part}.{name}": x for name, x in chosen.state().items()}
        meta[part] = {"name": chosen.name, "settings": chosen.settings()}
    meta["tensors"] = sorted(state)
    state["meta"] = torch.tensor(list(json.dumps(meta).encode()), dtype=torch.uint8)
    # fresh memory: tensors that share some cannot be written, and rounding may depend on how memory is aligned
    return {name: x.detach().clone(memory_format=torch.contiguous_format) for name, x in state.items()}


def fields(state: dict[str, Tensor]) -> dict[str, Any]:
    """The fields of the Context that `state_dict` described."""
    meta = _meta(state)

    def under(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)}

    try:
        if missing := set(meta["tensors"]) - set(state):
            raise KeyError(*sorted(missing))
        sums = under("stats.")
        made: dict[str, Any] = {name: state.get(name) for name in TENSORS}
        made["alpha"] = state["alpha"]
        made["stats"] = Sums(**sums) if sums else None
        made["fits_intercept"], made["covariance"] = meta["intercept"], meta["covariance"]
        made["dtype"] = DTYPES[meta["dtype"]]
        made["constraints"] = tuple(
            Constraint(state[f"constraint.{i}.normal"], state[f"constraint.{i}.bound"], kind)
            for i, kind in enumerate(meta["kinds"])
        )
        for part, make in (("kernel", restore), ("features", restore_features)):
            told = meta.get(part)
            made[part] = None if told is None else make(told["name"], told["settings"], under(f"{part}."))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"this is not the whole state of a Context: {error!r}; make one with ctx.state_dict()"
        ) from error
    return made


def _meta(state: dict[str, Tensor]) -> dict[str, Any]:
    try:
        meta = json.loads(bytes(state["meta"].tolist()))
        found = meta["format"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"this is not the state of a Context, it has no readable 'meta': {error!r}") from error
    if found != FORMAT:
        raise ValueError(f"the state has format {found}, this version reads {FORMAT}; use the version that wrote it")
    return meta


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


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError(
            "saving and loading need the package safetensors: pip install safetensors; or put "
            "ctx.state_dict() where your other tensors go"
        ) from None
    return safetensors.torch
