"""Section 3 and the appendix "Anomaly detection": the modules are the printed blocks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import intention.nn as inn
from intention import naive

close = partial(assert_close, rtol=1e-9, atol=1e-9)

batch, n, m, d, k, heads, width = 2, 7, 5, 3, 4, 3, 12


def test_definition_intention_module_with_embeddings(normal):
    """Claim: "h_int(K, V, Q) := e_Q(Q) w(K, V), w := e_w[Sigma(E_K)^-1 E_K' E_V]", with MLP embeddings."""
    embed = {
        "query": inn.mlp(d, 13, width),
        "key": inn.mlp(d, 13, width),
        "value": inn.mlp(k, 13, 6),
        "w": nn.Linear(6, 2),
    }
    embed = {f"embed_{name}": module.double() for name, module in embed.items()}
    head = inn.Intention(inn.LearnableAlpha(0.7, dtype=torch.float64), **embed)
    query, key, value = normal(m, d), normal(n, d), normal(n, k)
    e_query, e_key, e_value = head.embed_query(query), head.embed_key(key), head.embed_value(value)
    w = head.embed_w(torch.linalg.inv(naive.sigma(e_key, 0.7)) @ e_key.mT @ e_value)
    close(head(query, key, value), e_query @ w)


def test_claim_the_module_contains_least_squares(normal):
    """Claim: "as long as each e can represent the identity mapping the hypotheses space contains f_ls"."""
    query, key, value = normal(m, d), normal(n, d), normal(n, k)
    close(inn.Intention(0.7)(query, key, value), naive.intention(query, key, value, naive.sigma(key, 0.7)))


def test_claim_alpha_may_be_a_function_of_the_context(normal):
    """Claim: "a learnable alpha which is a function of K and V. This path is optional"."""
    query, key, value = normal(m, d), normal(n, d), normal(n, k)
    alpha = inn.ContextAlpha(d, k, dtype=torch.float64)
    nn.init.normal_(alpha.answer[-1].weight)
    want = naive.intention(query, key, value, naive.sigma(key, alpha(key, value)))
    close(inn.Intention(alpha)(query, key, value), want)


HEADS = {  # E_Z of a head, given the module of the head (Neural Process) and lambda
    "intention": lambda q, k, v, head, lam: naive.intention(q, k, v, naive.convex(k, lam)),
    "sigma_intention": lambda q, k, v, head, lam: naive.sigma_intention(q, k, v, naive.convex(k, lam)),
    "attention": lambda q, k, v, head, lam: naive.attention(q, k, v),
    "linear_attention": lambda q, k, v, head, lam: naive.linear_attention(q, k, v),
    "neural_process": lambda q, k, v, head, lam: neural_process(head, q, k, v),
}


def block(x, layer, name, lam):
    """The printed blocks, head by head, and the linear layer behind them."""
    embedded, inside = torch.relu(layer.embed_input(x)), layer.self_attn
    parts = nn.functional.linear(embedded, inside.in_proj_weight, inside.in_proj_bias).chunk(3, -1)
    own = getattr(inside, "heads", [None] * heads)
    each = zip(*(t.chunk(heads, -1) for t in parts), own, strict=True)
    return inside.out_proj(torch.cat([HEADS[name](*head, lam) for head in each], -1))


def neural_process(head, query, key, value):
    """E_C := e_C(1/N sum_i [E_K_i; E_V_i]), E_Z := e_Z([E_Q; E_C])"""
    context = head.embed_context(torch.cat([key, value], -1).mean(-2, keepdim=True))
    return head.embed_output(torch.cat([query, context.expand_as(query)], -1))


@pytest.mark.parametrize("name", ["intention", "sigma_intention", "attention", "linear_attention", "neural_process"])
def test_equation_former_blocks_and_layer(name, normal):
    """Claim: "E_X := max(0, e_X(X))", the five blocks, "O_1 := LayerNorm(E_Z + X)", "O_2 := LayerNorm(e_O(O_1) + O_1)".

    The printed blocks have no scale; e_K and e_V act on E_X.
    """
    options = {"covariance": "convex", "scale": None} if "intention" in name else {}
    options |= {"scale": 1.0} if "attention" in name else {}
    layer = inn.InformerLayer(
        width, heads, 17, 0.0, batch_first=True, dtype=torch.float64, mixer=name, embed_input=True, **options
    )
    x = normal(batch, n, width)
    first = layer.norm1(block(x, layer, name, lam=0.5) + x)
    close(layer(x), layer.norm2(layer.linear2(layer.linear1(first).relu()) + first))


def test_claim_heads_split_the_embedding(normal):
    """Claim: "we also can utilise multiple heads by splitting our embeddings space into subsets". One alpha each."""
    layer = inn.MultiheadIntention(width, heads, batch_first=True, scale=None, dtype=torch.float64)
    layer.alpha.theta.data.copy_(torch.tensor([-1.0, 0.0, 2.0]))
    x = normal(batch, n, width)
    parts = nn.functional.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
    outs = []
    for h, lam in enumerate(torch.sigmoid(layer.alpha.theta)):
        query, key, value = (t[..., 4 * h : 4 * h + 4] for t in parts)
        outs.append(naive.intention(query, key, value, naive.convex(key, lam)))
    close(layer(x, x, x)[0], layer.out_proj(torch.cat(outs, -1)))


def test_proposition_a_transformer_layer_averages_with_constant_keys(normal):
    """Claim: "put K = 1 (a matrix of 1s) and as a result Attention computes an average of values"."""
    query, value = normal(m, d), normal(n, k)
    close(inn.Attention()(query, torch.ones(n, d, dtype=torch.float64), value), value.mean(0).expand(m, k))
