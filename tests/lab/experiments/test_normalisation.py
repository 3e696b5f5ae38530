"""The variance of the maps: exact values, draws, verdicts."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from intention import functional as F
from intention import nn as inn
from intention.lab.core.place import Place
from intention.lab.core.results import Row
from intention.lab.experiments import normalisation
from intention.lab.experiments.normalisation.model import exact, of_inverse, variances
from lab.made import row, verdicts

close = partial(assert_close, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("n", "d"), [(5, 11), (11, 5)])
def test_variances_are_those_of_the_maps(n, d, normal):
    """The variance over queries, given the keys, against the maps of the library at many queries."""
    key, m = normal(1, n, d), 200_003
    query, unit = normal(1, m, d), torch.eye(n, dtype=torch.float64).unsqueeze(0)
    maps = {
        "unscaled": F.intention(query, key, unit, alpha=0),
        "scaled": d**0.5 * query @ torch.linalg.pinv(key),
        "regularised": F.intention(query, key, unit, covariance="convex", alpha=0.5, scale=0.5 * d**0.5),
        "variance": inn.Intention(1.0, scale="variance")(query, key, unit),
    }
    found = variances(key)
    for model, z in maps.items():
        assert found[model].item() == pytest.approx(z.square().mean().item(), rel=0.01), model


@pytest.mark.parametrize(("n", "d"), [(7, 31), (31, 7)])
def test_exact_variance(n, d):
    key = torch.randn(20_000, n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert variances(key)["unscaled"].mean().item() == pytest.approx(exact(n, d), rel=0.01)
    assert exact(7, 8) == exact(7, 7) == exact(7, 6) == math.inf


def test_draws_stop_when_the_mean_is_known():
    config = normalisation.Config(draws=5000, error=0.01)
    counts = [
        len(normalisation.draw(n, d, config, torch.Generator().manual_seed(0))["unscaled"])
        for n, d in ((4, 512), (4, 16), (8, 8))
    ]
    assert counts[0] == 2 * normalisation.BATCH < counts[1] < 5000
    assert counts[2] == 5000 // 6


def made_up_variances(scale: float = 1.0, half: float = 0.001, peak: float = 3.0) -> list[Row]:
    rows = []
    for d in (1, 2, 4, 16, 24, 32, 64, 128, 1024):
        true = min(exact(16, d), 1e4) * scale
        for model, value in (("unscaled", true), ("scaled", d * true), ("regularised", peak if d == 16 else 1.0)):
            interval = (value * (1 - half), value * (1 + half))
            rows.append(row(model, "variance", value, d, interval=interval, data={"n": 16}))
        rows.append(row("variance", "variance", 0.7, d, data={"n": 16}))
    return rows


def test_verdicts_of_made_up_variances():
    text = verdicts(normalisation, made_up_variances())
    assert text == ["holds", "not tested at this size", "does not hold", "holds", "holds", "holds in 1 of 2", "holds"]
    assert verdicts(normalisation, made_up_variances(scale=1.02, half=0.02))[0] == "not decided"
    assert verdicts(normalisation, made_up_variances(scale=1.05))[0] == "does not hold"
    assert verdicts(normalisation, made_up_variances(peak=1.5))[5] == "holds"
    assert verdicts(normalisation, made_up_variances(peak=1e6))[5] == "does not hold"
    assert verdicts(normalisation, made_up_variances(scale=1.5))[4] == "does not hold"
    outside = [
        dataclasses.replace(r, value=0.4) if r.model == "variance" and r.x == 64 else r for r in made_up_variances()
    ]
    assert verdicts(normalisation, outside)[6] == "does not hold"
    exploding = [
        dataclasses.replace(r, value=9.0) if r.model == "unscaled" and r.x == 1 else r for r in made_up_variances()
    ]
    assert verdicts(normalisation, exploding)[1:3] == ["not tested at this size", "holds"]
    printed = [dataclasses.replace(r, model="inverse") for r in exploding if r.model == "unscaled"]
    assert verdicts(normalisation, printed)[1:3] == ["holds", "not tested at this size"]


def test_the_printed_inverse_inverts_rounding_errors_where_d_is_small():
    """Where KK' has an inverse it is the pseudo-inverse; where it is singular its variance is far above 1."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    key = draw(50, 4, 32)
    assert_close(of_inverse(key), variances(key)["unscaled"], rtol=1e-3, atol=1e-6)
    medians = [of_inverse(draw(201, 16, d)).median().item() for d in (1, 2, 4)]
    assert medians[0] > medians[1] > medians[2] > 1
    assert variances(draw(201, 16, 1))["unscaled"].median() < 0.1
    config = normalisation.Config(sizes=(4,), dimensions=(1,), near=(1,), draws=2)
    found = [m for m in normalisation.run(next(iter(normalisation.jobs(config))), Place()) if m.model == "inverse"]
    assert [m.x for m in found] == [1, 3, 4, 5]
