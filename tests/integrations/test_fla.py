"""fla's signatures: `chunk_mesa_net` is the loop in float64, the layer is nn.GatedIntention with a cache."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from intention.integrations.fla import LayerStates, MesaIntention, chunk_mesa_net
from intention.nn import GatedIntention

D = torch.float64


def draw(batch: int, n: int, *, strongest: float = 0.5) -> dict[str, Any]:
    q, k, v = torch.randn(batch, n, 3, 4), torch.randn(batch, n, 3, 4), torch.randn(batch, n, 3, 5)
    gamma = 1 - (1 - strongest) * torch.rand(batch, n, 3)
    found = {"q": q, "k": k, "v": v, "g": gamma.log(), "beta": torch.rand(batch, n, 3), "lamb": 0.1 + torch.rand(3, 4)}
    return {name: x.to(D) for name, x in found.items()}


def loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lamb: Tensor, h_kk: Tensor, h_kv: Tensor):
    outs = []
    for t in range(q.shape[1]):
        left, key = g[:, t].exp()[..., None, None], k[:, t, :, :, None]
        h_kk = left * h_kk + beta[:, t, :, None, None] * key * key.mT
        h_kv = left * h_kv + beta[:, t, :, None, None] * key * v[:, t, :, None]
        outs.append((torch.linalg.solve(h_kk + torch.diag_embed(lamb), q[:, t]).unsqueeze(-2) @ h_kv).squeeze(-2))
    return torch.stack(outs, 1), h_kk, h_kv


def start(sequences: int) -> tuple[Tensor, Tensor]:
    key = torch.randn(sequences, 3, 6, 4, dtype=D)
    return key.mT @ key, torch.randn(sequences, 3, 4, 5, dtype=D)


def symmetric(slopes: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Of h_kk only changes that leave it symmetric are."""
    return tuple(x + x.mT if x.shape[-2:] == (4, 4) else x for x in slopes)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("strongest", [0.9, 0.01])
def test_mesa_is_the_loop(given: bool, strongest: float) -> None:
    call = draw(2, 40, strongest=strongest)
    first = start(2) if given else (torch.zeros(2, 3, 4, 4, dtype=D), torch.zeros(2, 3, 4, 5, dtype=D))
    leaves = [x.requires_grad_() for x in (*call.values(), *first)]
    want = loop(**call, h_kk=first[0], h_kv=first[1])
    own = {"h_kk_init": first[0], "h_kv_init": first[1]} if given else {}
    got = chunk_mesa_net(**call, **own, output_final_state=True, max_CG_iteration=30)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-8)
    slopes = [torch.randn_like(x) for x in want]
    leaves = leaves if given else leaves[:-2]
    found, wanted = (symmetric(torch.autograd.grad(x, leaves, slopes)) for x in (got, want))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
    out, none, nothing = chunk_mesa_net(**call, **own)
    torch.testing.assert_close(out, want[0], rtol=1e-6, atol=1e-8)
    assert none is nothing is None


@pytest.mark.parametrize("given", [False, True])
def test_mesa_of_packed_sequences(given: bool) -> None:
    call, ends = draw(1, 20), [0, 7, 8, 15, 20]
    kk, kv = start(4)
    own = {"h_kk_init": kk, "h_kv_init": kv} if given else {}
    out, h_kk, h_kv = chunk_mesa_net(**call, **own, output_final_state=True, cu_seqlens=torch.tensor(ends))
    for i, (a, b) in enumerate(itertools.pairwise(ends)):
        part = {name: x if name == "lamb" else x[:, a:b] for name, x in call.items()}
        first = (kk[i : i + 1], kv[i : i + 1]) if given else (torch.zeros_like(kk[:1]), torch.zeros_like(kv[:1]))
        want = loop(**part, h_kk=first[0], h_kv=first[1])
        torch.testing.assert_close((out[:, a:b], h_kk[i : i + 1], h_kv[i : i + 1]), want, rtol=1e-6, atol=1e-8)


def test_mesa_in_half_precision_and_with_unit_keys() -> None:
    call = {name: x.bfloat16() if name in "qkv" else x.float() for name, x in draw(2, 30).items()}
    unit = {**call, **{name: torch.nn.functional.normalize(call[name].to(D), dim=-1) for name in "qk"}}
    none = torch.zeros(1, dtype=D)
    want, *_ = loop(**{name: x.to(D) for name, x in unit.items()}, h_kk=none, h_kv=none)
    out, h_kk, _ = chunk_mesa_net(**call, use_qk_l2norm_in_kernel=True, output_final_state=True)
    assert (out.dtype, h_kk.dtype) == (torch.bfloat16, torch.float32)
    assert float((out.to(D) - want).norm() / want.norm()) < torch.finfo(torch.bfloat16).eps
    states = chunk_mesa_net(**call, output_final_state=True)
    again, *_ = chunk_mesa_net(**call, h_kk_init=states[1], h_kv_init=states[2])
    assert again.isfinite().all()


def test_mesa_names_what_does_not_fit() -> None:
    call = draw(2, 5)
    kk, kv = start(2)
    for bad, message in (
        ({"k": call["k"][..., :3]}, r"q and k must be \(B, T, H, K\)"),
        ({"g": call["g"].mT}, r"g must be \(B, T, H\) = \(2, 5, 3\), got 2x3x5"),
        ({"lamb": call["lamb"][:, 0]}, r"lamb must be \(H, K\) = \(3, 4\), got 3;"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "B = 1, got B = 2"),
        ({"h_kk_init": kk}, "belong together"),
        ({"h_kk_init": kk, "h_kv_init": kv[:1]}, r"h_kv_init must be \(2, 3, 4, 5\)"),
    ):
        with pytest.raises(ValueError, match=message):
            chunk_mesa_net(**(call | bad))


@pytest.mark.parametrize("mixer", ["intention", "gated_delta", "attention"])
def test_the_layer_is_ours_with_a_cache(mixer: str) -> None:
    torch.manual_seed(0)
    layer = MesaIntention(12, 3, layer_idx=1, mixer=mixer).double()
    plain = GatedIntention(12, 3, mixer=mixer).double()
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 9, 12, dtype=D)
    mask = torch.ones(2, 9).long()
    mask[0, :3] = 0
    want, _ = plain(x, mask)
    y, none, past = layer(x, mask)
    torch.testing.assert_close(y, want)
    assert none is past is None
    first, _, past = layer(x[:, :5], mask[:, :5], use_cache=True)
    assert isinstance(past, LayerStates)
    assert len(past) == 2
    rest = [layer(x[:, t : t + 1], mask[:, : t + 1], past, use_cache=True)[0] for t in range(5, 8)]
    past.reorder_cache(torch.tensor([1, 0]))
    last, _, _ = layer(x[[1, 0], 8:], mask[[1, 0]], past, use_cache=True)
    torch.testing.assert_close(torch.cat([first, *rest, last[[1, 0]]], 1), want)
    packed, *_ = layer(x.view(1, 18, 12), cu_seqlens=torch.tensor([0, 9, 18]), position_ids=None)
    torch.testing.assert_close(packed.view(2, 9, 12), plain(x)[0])


def test_the_layer_names_what_does_not_fit() -> None:
    layer, x = MesaIntention(12, 3), torch.randn(2, 9, 12)
    with pytest.raises(ValueError, match="use output_attentions=False"):
        layer(x, output_attentions=True)
    with pytest.raises(ValueError, match="layer_idx, which is None"):
        layer(x, use_cache=True)
    with pytest.raises(ValueError, match=r"attention_mask must be .* got \(2, 5\) for 9 tokens"):
        layer(x, torch.ones(2, 5))
