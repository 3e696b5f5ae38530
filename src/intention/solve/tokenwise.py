"""Causal least squares token by token: A_t is made and factored for each. O(N d^3), and differentiable to any order.

For what chunks cannot do: derivatives beyond the first, forward-mode AD, and decays so strong that a chunk is nearly
empty.
"""

from __future__ import annotations

import torch
from torch import Tensor

from intention.solve.causal import Tokens
from intention.solve.decay import Faded, fade, read

LENGTH = 8  # tokens of a chunk
AT_ONCE = 1 << 22  # numbers of a tensor of matrices A_t (32 MiB)


def tokenwise(tokens: Tokens, log_decay: Tensor | None) -> tuple[Tensor, Tensor]:
    """Answers (B, N, k), or (B, N, d) without values, in float64, and a bound of the condition from below (B,)."""
    if log_decay is None:
        log_decay = torch.zeros(tokens.key.shape[:2], dtype=torch.float64, device=tokens.key.device)
    faded = fade(tokens, log_decay, LENGTH)
    batch, n, size, d = faded.own.key.shape
    step = max(1, AT_ONCE // (batch * size * d * d))
    found = [_solve(faded, start, min(start + step, n)) for start in range(0, n, step)]
    z, ratio = torch.cat([one for one, _ in found], 1), torch.cat([two for _, two in found], 1)
    out = z if tokens.value is None else read(faded, z)
    return out.flatten(1, 2)[:, : tokens.query.shape[1]], ratio.amax(1)


def _solve(faded: Faded, first: int, last: int) -> tuple[Tensor, Tensor]:
    """A_t^-1 q_t of some chunks."""
    own = faded.own
    key, share = own.key[:, first:last], faded.share[:, first:last]
    outer = (key if own.weight is None else own.weight[:, first:last] * key).unsqueeze(-1) * key.unsqueeze(-2)
    inside = (share @ outer.flatten(-2)).unflatten(-1, outer.shape[-2:])  # (B, n, C, d, d)
    before = faded.from_start[:, first:last].unsqueeze(-1) * faded.gram[:, first:last].unsqueeze(2)
    sigma = inside + before
    if own.gain is not None:
        sigma = sigma * own.gain.unsqueeze(-1)
    eye = torch.eye(key.shape[-1], dtype=key.dtype, device=key.device)
    sigma = sigma + own.alpha.unsqueeze(-1) * eye
    lower, failed = torch.linalg.cholesky_ex(sigma)
    diagonal = lower.diagonal(0, -2, -1)
    ratio = sigma.diagonal(0, -2, -1).amax(-1) / diagonal.square().amin(-1)
    ratio = ratio.detach().masked_fill(failed.bool(), torch.inf)
    return torch.cholesky_solve(own.query[:, first:last].unsqueeze(-1), lower).squeeze(-1), ratio.amax(-1)
