"""Causal Intention over sequences: a state of constant size, forgetting, and packed sequences.

The fit of token t sees tokens <= t, each with its weight and what is left of it after later decays:

    S_t = gamma_t S_{t-1} + w_t k_t k_t',   B_t = gamma_t B_{t-1} + w_t k_t v_t',   o_t = q_t (c S_t + alpha I)^-1 B_t

S and B are the state: its size does not depend on the number of tokens.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from os import PathLike
from typing import NamedTuple

import torch
import torch.nn.functional as TF
from torch import Tensor

from intention import _checks as checks
from intention._call.softmax import scored
from intention._covariance import alpha_of, gain_of
from intention.context import storage
from intention.sequences import ragged
from intention.solve.causal.each_query import triangle
from intention.solve.causal.fading import chunks, faded_sums, fading
from intention.solve.causal.sequence import causal
from intention.solve.ladder import Report
from intention.solve.operator import no_autocast
from intention.solve.problem import Problem, Tokens
from intention.solve.torch_state import compiling, gradient_free, look

__all__ = ["CausalState", "causal_intention"]

SUMS = torch.float64
CHUNK = 64  # tokens whose sums are made at once
SLOPES_RATIO = 1e4  # the condition up to which sums in float64 serve gradients, whose errors grow with its square


class Ridge(NamedTuple):
    """Of which fits are made beside tokens."""

    alpha: Tensor
    covariance: str
    alpha_per: str = "head"  # alpha is (...); "token": (..., N); "channel": (..., d)


@dataclass(frozen=True)
class CausalState:
    """The sums over the tokens so far. Nothing is changed in place: `prefill` and `step` give a new state.

    >>> state = CausalState.empty(3, 2, alpha=0.1)
    >>> q, k, v = torch.randn(5, 3), torch.randn(5, 3), torch.randn(5, 2)
    >>> first, state = state.prefill(q[:4], k[:4], v[:4])
    >>> last, state = state.step(q[4], k[4], v[4])
    >>> whole = causal_intention(q, k, v, alpha=0.1)
    >>> torch.allclose(torch.cat([first, last[None]]), whole, atol=1e-5)
    True
    """

    gram: Tensor  # (..., d, d), float64: S
    cross: Tensor  # (..., d, k), float64: B
    alpha: Tensor  # (...), or (..., d): one for each channel
    covariance: str = "ridge"
    alpha_per: str = "head"

    @staticmethod
    def empty(
        d: int,
        k: int,
        lead: tuple[int, ...] = (),
        *,
        alpha: float | Tensor | None = None,
        covariance: str = "ridge",
        device: torch.device | str | int | None = None,
        alpha_per: str = "head",
    ) -> CausalState:
        """Before the first token. `alpha` (one per head; (..., d) per "channel") broadcasts to the leading dimensions.

        One per token is given to `prefill` and `step`.
        """
        checks.choice("alpha_per", alpha_per, ("head", "channel"))
        ridge = _ridge(alpha, covariance, device, alpha_per)
        if alpha_per == "channel":
            checks.per_channel(ridge.alpha, d)
        own = ridge.alpha.shape[:-1] if alpha_per == "channel" else ridge.alpha.shape
        lead = tuple(torch.broadcast_shapes(lead, own))
        gram, cross = (torch.zeros(*lead, d, size, dtype=SUMS, device=device) for size in (d, k))
        return CausalState(gram, cross, *ridge)

    def prefill(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        weight: Tensor | None = None,
        decay: Tensor | None = None,
        scale: float | None = None,
        alpha: Tensor | None = None,
    ) -> tuple[Tensor, CausalState]:
        """Answers (..., N, k) to the next N tokens, all at once, and the state after them.

        query and key (..., N, d), value (..., N, k); weight and decay (..., N), as in `causal_intention`; `alpha`
        (..., N) is used for these tokens in place of the state's.
        """
        ridge = None if alpha is None else _ridge(alpha, self.covariance, query.device, "token")
        out, state, _ = _run(query, key, value, weight, decay, scale, self, ridge)
        assert state is not None
        return out, state

    def step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        weight: Tensor | None = None,
        decay: Tensor | None = None,
        scale: float | None = None,
        alpha: Tensor | None = None,
    ) -> tuple[Tensor, CausalState]:
        """The answer (..., k) to one token, and the state after it.

        query and key (..., d), value (..., k); weight, decay and alpha (...).
        """
        given = {"weight": weight, "decay": decay, "alpha": alpha}
        for name, x in given.items():
            if x is not None:
                checks.tensor_of_tokens(name, x)
        rest = {name: None if x is None else x.unsqueeze(-1) for name, x in given.items()}
        out, state = self.prefill(*(x.unsqueeze(-2) for x in (query, key, value)), **rest, scale=scale)
        return out.squeeze(-2), state

    def reorder(self, index: Tensor, dim: int = 0) -> CausalState:
        """The states `index` (n,) of the sequences along `dim` of the leading ones: what a beam search needs."""
        lead = self.gram.shape[:-2]
        alpha = self.alpha.expand(self.gram.shape[:-1] if self.alpha_per == "channel" else lead)
        dim = dim % len(lead)
        gram, cross, alpha = (x.index_select(dim, index) for x in (self.gram, self.cross, alpha))
        return dataclasses.replace(self, gram=gram, cross=cross, alpha=alpha)

    def detach(self) -> CausalState:
        """The same state without the graph that led to it."""
        gram, cross, alpha = (x.detach() for x in (self.gram, self.cross, self.alpha))
        return dataclasses.replace(self, gram=gram, cross=cross, alpha=alpha)

    def state_dict(self) -> dict[str, Tensor]:
        """Plain tensors."""
        said = {"convex": self.covariance == "convex", "channel": self.alpha_per == "channel"}
        tensors = {"gram": self.gram, "cross": self.cross, "alpha": self.alpha}
        tensors |= {name: torch.tensor(x) for name, x in said.items()}
        return {name: x.detach().clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}

    @staticmethod
    def from_state_dict(state: dict[str, Tensor]) -> CausalState:
        if missing := {"gram", "cross", "alpha", "convex"} - set(state):
            raise ValueError(f"this is not the whole state of a CausalState: {', '.join(sorted(missing))} missing")
        covariance = "convex" if bool(state["convex"]) else "ridge"
        per = "channel" if bool(state.get("channel", False)) else "head"
        return CausalState(state["gram"], state["cross"], state["alpha"], covariance, per)

    def save(self, path: str | PathLike) -> None:
        """A safetensors file."""
        storage.save(self.state_dict(), path)

    @staticmethod
    def load(path: str | PathLike, device: str = "cpu") -> CausalState:
        return CausalState.from_state_dict(storage.load(path, device))


Sigma = tuple[Tensor, Tensor, CausalState]  # what sigma-Intention remembers of a stream: keys, values, Sigma


def causal_intention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    alpha: float | Tensor | None = None,
    covariance: str = "ridge",
    weight: Tensor | None = None,
    decay: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    alpha_per: str = "head",
) -> Tensor:
    """The answer to every token from a fit of the tokens up to it, in O(N (d^2 + d k)) time.

    Args:
        query, key: (..., N, d).
        value: (..., N, k).
        alpha, covariance, scale: as in `functional.intention`; the covariance is "ridge" or "convex".
        weight: (..., N) >= 0; 0 leaves a token out (padding), others are input gates.
        decay: (..., N) in [0, 1]: at token t everything before it counts decay_t times what it did; 0 is a reset.
            alpha does not decay.
        cu_seqlens: (S + 1,) integers from 0 to N: the sequences of a packed batch, each with a fit of its own.
        alpha_per: "head": alpha is (...); "token": (..., N), that of each fit; "channel": (..., d) > 0, a ridge whose
            features differ. The last two with the ridge covariance.

    Returns:
        (..., N, k), in the dtype of the inputs.
    """
    ridge = _ridge(alpha, covariance, query.device, alpha_per)
    if cu_seqlens is None:
        return _run(query, key, value, weight, decay, scale, ridge)[0]
    ends = checks.cu_seqlens(cu_seqlens, key.shape[-2])
    if not key.shape[-2]:
        return query @ (key.mT @ value)
    outs, places = [], []  # sequences of similar length side by side: at most half of what is computed is padding
    for _, index, there in ragged.groups(sorted(set(ends)), key.device):  # without those that are empty

        def part(x: Tensor, dim: int, index: Tensor = index) -> Tensor:
            return x.index_select(dim, index.flatten()).unflatten(dim, index.shape)

        own = there.to(key.dtype) if weight is None else torch.where(there, part(weight, -1), 0.0)
        fade = None if decay is None else torch.where(there, part(decay, -1), 1.0)
        each = ridge.alpha
        if each.dim():
            each = part(each, -1) if alpha_per == "token" else each.unsqueeze(-2 if alpha_per == "channel" else -1)
        before = ridge._replace(alpha=each)
        out, *_ = _run(part(query, -2), part(key, -2), part(value, -2), own, fade, scale, before)
        outs.append(out.flatten(-3, -2).index_select(-2, there.flatten().nonzero()[:, 0]))
        places.append(index[there])
    return torch.cat(outs, -2).index_select(-2, torch.cat(places).argsort())


def _ridge(
    alpha: float | Tensor | None, covariance: str, device: torch.device | str | int | None, alpha_per: str
) -> Ridge:
    checks.choice("covariance", covariance, ("ridge", "convex"))
    checks.choice("alpha_per", alpha_per, ("head", "token", "channel"))
    if alpha_per != "head" and covariance != "ridge":
        raise ValueError(f"one alpha per {alpha_per} goes with covariance='ridge', got {covariance!r}")
    if not isinstance(alpha, Tensor):
        alpha = torch.tensor(alpha_of(alpha, covariance), dtype=SUMS, device=device)  # rounded where the tokens are
    return Ridge(alpha, covariance, alpha_per)


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    weight: Tensor | None,
    decay: Tensor | None,
    scale: float | None,
    before: CausalState | Ridge,
    ridge: Ridge | None = None,
) -> tuple[Tensor, CausalState | None, Report]:
    """Answers, the state after them where there was one, a report; without values answers are transformed queries."""
    read = key if value is None else value
    checks.points(query, key, read)
    checks.scale(scale)
    n = key.shape[-2]
    if query.shape[-2] != n:
        raise ValueError(f"every token has a query, a key and a value, got {query.shape[-2]} queries and {n} keys")
    state = before if isinstance(before, CausalState) else None
    alpha, covariance, per = ridge or (before.alpha, before.covariance, before.alpha_per)
    shapes = {"query": query.shape[:-2], "key": key.shape[:-2], "value": read.shape[:-2]}
    for name, x in (("weight", weight), ("decay", decay), ("alpha", alpha if per == "token" else None)):
        if x is not None:
            checks.per_token(name, x, n)
            shapes[name] = x.shape[:-1]
    if per == "channel":
        checks.per_channel(alpha, key.shape[-1])
        if not compiling():
            checks.positive_channels(look(alpha))
    shapes["alpha"] = alpha.shape if per == "head" else alpha.shape[:-1]
    if state is not None:
        checks.state_of(state.gram, state.cross, key.shape[-1], 0 if value is None else read.shape[-1])
        shapes["state"] = state.gram.shape[:-2]
    lead = checks.leading(**shapes)
    dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), read.dtype)
    working = torch.float64 if dtype == torch.float64 else torch.float32

    def flat(x: Tensor, trailing: int, to: torch.dtype = working) -> Tensor:
        own = x.shape[x.dim() - trailing :]
        return x.to(to).expand((*lead, *own)).reshape(math.prod(lead), *own)

    regulariser = flat(alpha.to(query.device), 0 if per == "head" else 1)
    gain = gain_of(regulariser, covariance)
    fades = None if decay is None else flat(decay, 1, SUMS)
    values, weights = None if value is None else flat(value, 2), None if weight is None else flat(weight, 1)
    gram = None if state is None else flat(state.gram, 2, SUMS)
    cross = None if state is None or value is None else flat(state.cross, 2, SUMS)
    tokens = Tokens(flat(query, 2), flat(key, 2), values, weights, regulariser, gain, gram, cross, fades)
    out, packed = causal(_divided(tokens) if per == "channel" else tokens)
    report = Report(*(x.reshape(lead) for x in packed.unbind(-1)))
    if scale is not None:
        out = out * scale
    out = out.reshape(*lead, *out.shape[1:]).to(dtype)
    if state is None:
        return out, None, report
    gram, cross = (x.reshape(*lead, *x.shape[1:]) for x in _after(tokens))
    return out, dataclasses.replace(state, gram=gram, cross=cross), report


def _divided(tokens: Tokens) -> Tokens:
    """With an alpha of 1 in place of one for each channel (B, d): q (K'K + D)^-1 = (q D^-1/2) (..)^-1 D^-1/2."""
    root = tokens.alpha.sqrt().unsqueeze(1)
    wide = root.to(SUMS)
    gram = None if tokens.gram is None else tokens.gram / wide / wide.mT
    cross = None if tokens.cross is None else tokens.cross / wide.mT
    one = torch.ones_like(tokens.alpha[:, 0])
    rest = (tokens.value, tokens.weight, one, tokens.gain, gram, cross, tokens.decay)
    return Tokens(tokens.query / root, tokens.key / root, *rest)


def _after(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """S and B after the last token."""
    assert tokens.gram is not None
    if not tokens.key.shape[1]:
        return tokens.gram, tokens.gram[..., :0] if tokens.cross is None else tokens.cross
    d, key = tokens.key.shape[2], tokens.key.to(SUMS)
    counted = key if tokens.weight is None else key * tokens.weight.unsqueeze(-1).to(SUMS)
    both = key if tokens.value is None else torch.cat([key, tokens.value.to(SUMS)], -1)
    total = tokens.gram if tokens.cross is None else torch.cat([tokens.gram, tokens.cross], -1)
    if tokens.decay is None:
        total = total + counted.mT @ both
    else:
        fade, counted, both = fading(tokens.decay, CHUNK), chunks(counted, CHUNK), chunks(both, CHUNK)
        _, total = faded_sums(total, (fade.to_end * counted).mT @ both, fade.whole)
    return total[..., :d], total[..., d:]


@no_autocast
def sigma_stream(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor,
    covariance: str,
    scale: float | None,
    memory: Sigma | None,
    seen: Tensor | None = None,
) -> tuple[Tensor, Sigma]:
    """sigma-Intention of the next tokens. Sigma is a sum; the softmax needs all keys and values.

    seen: (batch,), where sequences have different lengths: how many tokens each had. The keys of padding, which stands
        behind the tokens of a call, are 0.
    """
    lead = key.shape[:-2]
    if memory is None:
        d, place = key.shape[-1], key.device
        state = CausalState.empty(d, 0, lead, alpha=alpha, covariance=covariance, device=place)
        memory = (key[..., :0, :], value[..., :0, :], state)
    keys, values, state = memory
    before, free = keys.shape[-2], gradient_free(key, keys, state.gram)
    # Slopes through Sigma and through the keys that the softmax meets nearly cancel: added unrounded
    key = key if free else key.to(SUMS)
    keys, values = ragged.appended(keys, key, seen), ragged.appended(values, value, seen)
    m, working = query.shape[-2], torch.float64 if query.dtype == torch.float64 else torch.float32

    def transformed(query: Tensor, key: Tensor, start: CausalState | Ridge) -> tuple[Tensor, CausalState | None, bool]:
        moved, after, report = _run(query, key, None, None, None, scale, start)
        told = Problem(query, key, value, None, state.alpha, None)
        moved = ragged.last(moved, m, seen) if query.shape[-2] > m else moved
        moved, _, again = scored(moved, keys.to(moved.dtype), report, "auto", told)
        steep = not free and not compiling() and bool((look(report.condition) > SLOPES_RATIO).any())
        return moved, after, again or steep

    moved, after, again = transformed(query.to(working), key.to(working), state)
    if again and free:
        moved, after, _ = transformed(query.double(), key.double(), state)
    elif again:  # of the sums slopes know too little, and here all keys are known
        rows = ragged.appended(torch.zeros_like(keys[..., :before, :]), query.double(), seen)
        moved, *_ = transformed(rows, keys.double(), Ridge(state.alpha, covariance))
    assert after is not None
    if not free:
        after = dataclasses.replace(after, gram=state.gram + key.mT @ key)
    shown = None if before == 0 else triangle(m, keys.shape[-2], key.device, before if seen is None else seen)
    k, v = keys.to(moved.dtype), values.to(moved.dtype)
    out = TF.scaled_dot_product_attention(moved, k, v, shown, is_causal=shown is None, scale=1.0)
    return out.to(value.dtype), (keys, values, after)
