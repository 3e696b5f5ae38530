"""What the ranks of a process group say to each other: sums with derivatives, and agreement before they wait."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NoReturn, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from intention.solve.torch_state import Ctx, gradient_free

__all__ = ["agree", "member", "place", "sum_over_ranks"]

TEXT = 512  # bytes in which a rank says what it was called with, sent only when ranks differ


Brought = TypeVar("Brought")


class KeptGroup(Ctx, Protocol):
    group: dist.ProcessGroup
    forth: float
    back: float


class SumOverRanks(torch.autograd.Function):
    """(x, group, forth, back) -> forth * (sum of x over ranks); the derivative is the same with the factors swapped.

    Where every rank has a loss of its own both factors are 1: the x of a rank enters the sums of all, so its gradient
    is the sum of theirs. Where all compute the same loss `back` is 1 / ranks: theirs are copies of one gradient. That
    one is handed to every rank, so its own derivative is a sum again.
    """

    @staticmethod
    def forward(x: Tensor, group: dist.ProcessGroup, forth: float, back: float) -> Tensor:
        return _all_reduce(x.clone(memory_format=torch.contiguous_format), group) * forth

    @staticmethod
    def setup_context(ctx: KeptGroup, inputs: tuple[Tensor, dist.ProcessGroup, float, float], output: Tensor) -> None:
        _, ctx.group, ctx.forth, ctx.back = inputs

    @staticmethod
    def backward(ctx: KeptGroup, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return SumOverRanks.apply(grads[0], ctx.group, ctx.back, ctx.forth), None, None, None


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup, back: float, wanted: bool) -> Tensor:
    """x is ours. `wanted`: some rank wants a gradient, so all must take part in the backward."""
    if wanted and not x.requires_grad:
        x.requires_grad_()
    return _all_reduce(x, group) if gradient_free(x) else SumOverRanks.apply(x, group, 1.0, back)


def _all_reduce(x: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    dist.all_reduce(x, op=op, group=group)
    return x


def agree(
    read: Callable[[], tuple[Brought, str, bool]], options: str, group: dist.ProcessGroup, device: torch.device
) -> tuple[Brought, bool]:
    """What `read` gives, and whether any rank wants a gradient; or an error, on all ranks instead of on some.

    `read`: (what this rank brings, what all must have the same, whether it wants a gradient).
    """
    local, error, wanted = None, None, False
    try:
        local, same, wanted = read()
        text = f"{same}, {options}"
    except Exception as caught:  # whatever it is, the other ranks are waiting
        text, error = f"{type(caught).__name__}: {caught}", caught
    mark = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    told = torch.tensor([mark, -mark, error is not None, wanted], dtype=torch.int64, device=device)
    high, low, failed, wanted = _all_reduce(told, group, dist.ReduceOp.MAX).tolist()
    if failed or high != -low:
        _raise_together(text, error, bool(failed), group, device)
    assert local is not None
    return local, bool(wanted)


def _raise_together(
    text: str, error: Exception | None, failed: bool, group: dist.ProcessGroup, device: torch.device
) -> NoReturn:
    mine = bytes([error is not None]) + text.encode()[: TEXT - 1]
    sent = torch.tensor(list(mine.ljust(TEXT, b"\0")), dtype=torch.uint8, device=device)
    got = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(got, sent, group=group)
    if error is not None:
        raise error
    told = [bytes(x.tolist()) for x in got]
    texts = {rank: x[1:].rstrip(b"\0").decode(errors="replace") for rank, x in enumerate(told) if x[0] or not failed}
    listing = "\n".join(f"  rank {rank}: {x}" for rank, x in texts.items())
    if failed:
        raise RuntimeError(f"another rank of {len(told)} cannot take part:\n{listing}")
    raise ValueError(
        "all ranks must be called with the same leading dimensions, d, k, dtypes, grad mode, alpha and options (N may "
        f"differ, and be 0), got\n{listing}"
    )


def member(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The process group, of which this process is part."""
    if not dist.is_available():
        raise RuntimeError("this build of torch has no torch.distributed; use intention.fit, of one process")
    if not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed has no process group; start with torchrun and call "
            "torch.distributed.init_process_group, or use intention.fit, of one process"
        )
    group = dist.group.WORLD if group is None else group
    assert group is not None  # of an initialised process
    if dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is no member of this group; call on the ranks that are, only")
    return group


def place(key: object, group: dist.ProcessGroup) -> torch.device:
    """Where the ranks talk: beside the keys, or, where those are no tensor, where the backend can."""
    if isinstance(key, Tensor):
        return key.device
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
