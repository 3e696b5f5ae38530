"""Encoders in safetensors files: those that come with the package, and your own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from os import PathLike, fspath
from pathlib import Path

import torch

from intention.fewshot.encoders import KINDS, Encoder, build

__all__ = ["SHIPPED", "about_encoder", "load_encoder", "save_encoder"]

SHIPPED = ("conv4",)
CLONE = Path(__file__).resolve().parents[3]  # of the repository, where this is one


def save_encoder(
    path: str | PathLike[str], encoder: Encoder, about: Mapping[str, object] | None = None, half: bool = False
) -> None:
    """The weights and what is needed to build the encoder again, in one safetensors file (extra `safetensors`).

    Args:
        about: more to say of it, told by `about_encoder`.
        half: weights in float16, half the size.
    """
    from safetensors.torch import save_file

    sizes = {name: getattr(encoder, name) for name in ("kind", "size", "channels", "width", "round_up")}
    tensors = {
        name: tensor.to(torch.float16 if half and tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in encoder.state_dict().items()
    }
    told = {"encoder": json.dumps(sizes)} | ({} if about is None else {"about": json.dumps(dict(about))})
    save_file(tensors, fspath(path), told)


def load_encoder(name: str | PathLike[str] = "conv4") -> Encoder:
    """An encoder with trained weights, ready for use: in evaluation mode, float32.

    >>> encoder = load_encoder("conv4")
    >>> encoder(torch.zeros(2, 3, 28, 28)).shape
    torch.Size([2, 256])

    Args:
        name: "conv4", whose weights come with the package, the name of a file in `encoders` of a clone, or the path of
            a file of `save_encoder`.
    """
    path = _path(name)
    try:
        told, tensors = _read(path)
        sizes = json.loads(told["encoder"])
        if sizes["kind"] not in KINDS:
            raise ValueError(f"its kind is {sizes['kind']!r}, not one of {KINDS}")
        size, channels, width = (int(sizes[part]) for part in ("size", "channels", "width"))
        encoder = build(sizes["kind"], size, channels, width, round_up=bool(sizes.get("round_up")))
        encoder.load_state_dict(tensors)  # into float32
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} is not an encoder of ours ({error}); save_encoder writes one") from error
    return encoder.eval()


def about_encoder(name: str | PathLike[str] = "conv4") -> dict[str, object]:
    """What its file says of an encoder: on what it was trained and how, and its accuracy.

    >>> about_encoder("conv4")["data"]
    'miniImageNet, 28 x 28, the 80 training classes'
    """
    return json.loads(_read(_path(name))[0].get("about", "{}"))


def _path(name: str | PathLike[str]) -> Path:
    if name in SHIPPED:
        return Path(str(resources.files("intention.fewshot") / "weights" / f"{name}.safetensors"))
    path, kept = Path(name).expanduser(), CLONE / "encoders"
    if path.is_file():
        return path
    named = kept / f"{path}.safetensors"
    if (CLONE / "pyproject.toml").is_file() and named.parent == kept and named.is_file():
        return named
    shipped = ", ".join(map(repr, SHIPPED))
    raise FileNotFoundError(
        f"there is no encoder {fspath(name)!r}; give {shipped}, which comes with the package, a name in {kept}, or the "
        "path of a file of save_encoder"
    )


def _read(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ImportError("encoders are kept as safetensors: pip install 'intention[fewshot]'") from None

    try:
        with safe_open(str(path), framework="pt") as file:
            names: list[str] = list(file.keys())
            return dict(file.metadata() or {}), {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
