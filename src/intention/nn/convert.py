"""Another computation in the place of attention, in a model that exists already."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from intention.nn.mixers import make_mixer
from intention.nn.multihead import Multihead, settings_of, unlike_torchs

__all__ = ["Swapped", "swap_attention"]

BOTH = ("forward", "backward", "state_dict")  # of which there are hooks before and after
HOOKS = (
    *(f"_{x}{pre}_hooks" for x in BOTH for pre in ("", "_pre")),
    *(f"_load_state_dict_{x}_hooks" for x in ("pre", "post")),
)
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")


class Swapped(NamedTuple):
    """What `swap_attention` did. Prints as a table."""

    model: nn.Module  # the same object, unless it was itself an nn.MultiheadAttention
    changed: tuple[str, ...]  # names of the modules that were replaced
    skipped: dict[str, str]  # name of a module that computes attention and was left alone -> why
    added: tuple[str, ...]  # names of parameters that are new: an optimiser that exists does not know them

    def __str__(self) -> str:
        lines = [f"{len(self.changed)} replaced, {len(self.skipped)} left alone"]
        lines += [f"  replaced    {name or '(the model itself)'}" for name in self.changed]
        lines += [f"  left alone  {name or '(the model itself)'}: {why}" for name, why in self.skipped.items()]
        lines += [f"  new         {name}" for name in self.added]
        return "\n".join(lines)


def swap_attention(
    model: nn.Module, mixer: str | Callable[..., nn.Module] = "sigma_intention", **options: Any
) -> Swapped:
    """Replace every nn.MultiheadAttention in a model, in place, keeping its parameters (the same objects).

    >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, batch_first=True), 2)
    >>> print(swap_attention(model, "sigma_intention", alpha=0.5))
    2 replaced, 0 left alone
      replaced    layers.0.self_attn
      replaced    layers.1.self_attn

    Convert before wrapping a model in DDP or FSDP, and before making its optimiser where alpha is learnt.

    Args:
        model: any module.
        mixer: as in `InformerLayer`: a name, a class or a function.
        options: of the mixer: alpha, covariance, scale. With mixer="sigma_intention", covariance="convex", alpha=1 and
            scale="attention" the model computes what it did; the same with covariance="ridge" as alpha grows.
    """
    _check_unwrapped(model)
    made: dict[int, nn.Module] = {}  # a module used at several places stays one
    changed: list[str] = []
    skipped: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        why = _why_not(module)
        if why is not None:
            skipped |= {name: why} if why else {}
        elif isinstance(module, nn.MultiheadAttention):
            if id(module) not in made:
                made[id(module)] = _converted(module, mixer, options)
            changed.append(name)
    # nothing has changed so far, should an option be wrong
    modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
    before = {name for name, _ in model.named_parameters()}
    for name in filter(None, changed):
        parent, _, leaf = name.rpartition(".")
        setattr(modules[parent], leaf, made[id(modules[name])])
    for name, module in modules.items():
        if id(module) in made or isinstance(module, Multihead):
            _slow(modules, name)
    if not changed and not skipped:
        warnings.warn(
            f"swap_attention found no nn.MultiheadAttention in {type(model).__name__} and changed nothing; for Hugging "
            "Face models use intention.integrations.transformers",
            stacklevel=2,
        )
    model = made.get(id(model), model)
    added = [name for name, _ in model.named_parameters() if name not in before]
    return Swapped(model, tuple(changed), skipped, tuple(added))


def _check_unwrapped(model: nn.Module) -> None:
    wrapped = any(type(m).__name__ in WRAPPERS for m in model.modules())
    if wrapped or any(hasattr(p, "to_local") for p in model.parameters()):
        raise ValueError(
            "the model is wrapped in DDP or FSDP, which would not know of a new alpha; call swap_attention first, and "
            "wrap what it returns"
        )


def _converted(
    attention: nn.MultiheadAttention, mixer: str | Callable[..., nn.Module], options: dict[str, Any]
) -> nn.Module:
    made = make_mixer(mixer, **settings_of(attention), **options)
    parameters = dict(attention.named_parameters())
    missing = parameters.keys() - {name for name, _ in made.named_parameters()}
    if missing:
        raise TypeError(
            f"a mixer must have the parameters of nn.MultiheadAttention, and {type(made).__name__} lacks "
            f"{', '.join(sorted(missing))}; derive it from intention.nn.MultiheadIntention or nn.MultiheadAttention"
        )
    for name, parameter in parameters.items():  # the same objects: an optimiser goes on with them
        parent, _, leaf = name.rpartition(".")
        setattr(made.get_submodule(parent), leaf, parameter)
    return made.train(attention.training)


def _slow(modules: dict[str, Any], name: str) -> None:
    """Keep torch's encoders off their fast paths, which compute softmax attention whatever the mixer at `name` does."""
    while name:
        name = name.rpartition(".")[0]
        if isinstance(modules[name], nn.TransformerEncoderLayer):
            modules[name].activation_relu_or_gelu = 0  # the activation itself is another attribute
        if isinstance(modules[name], nn.TransformerEncoder):
            modules[name].use_nested_tensor = False  # decided when it was built


def _why_not(module: nn.Module) -> str | None:
    """None: replace it. "": there is no attention here. Else why this attention is left alone."""
    if isinstance(module, Multihead):
        return f"is a {type(module).__name__} of this library already"
    if not isinstance(module, nn.MultiheadAttention):
        # a guess by name: a class called ...Attention... that holds no other one
        own = _named_attention(module) and not any(map(_named_attention, list(module.modules())[1:]))
        return f"{type(module).__name__} is not an nn.MultiheadAttention: its own forward computes attention" * own
    if type(module) is not nn.MultiheadAttention:
        return f"{type(module).__name__} is a subclass of nn.MultiheadAttention and may compute something else"
    if "forward" in vars(module):
        return "its forward was replaced by hand and may compute something else"
    unlike = unlike_torchs(module)
    if not unlike and any(getattr(m, hook, None) for m in module.modules() for hook in HOOKS):
        return "it has hooks, which would be lost; remove them first and register them again"
    return unlike or None


def _named_attention(module: nn.Module) -> bool:
    return "attention" in type(module).__name__.lower() or isinstance(module, nn.MultiheadAttention)
