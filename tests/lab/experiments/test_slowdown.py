"""What is timed, how it is summed up, and the verdicts."""

from __future__ import annotations

import dataclasses
import math
import statistics
from functools import partial

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from intention import functional as F
from intention.lab.core.place import Place
from intention.lab.experiments import slowdown
from intention.lab.experiments.base import Job
from intention.lab.experiments.slowdown import jitted
from intention.lab.experiments.slowdown import model as codes
from lab.made import row, verdicts

close = partial(assert_close, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("n", "d"), [(13, 5), (5, 13)])
def test_timed_codes_compute_what_they_should(n, d, normal):
    query, key, value = normal(1, 1, n, d), normal(1, 1, n, d), normal(1, 1, n, d)
    close(codes.inverse(query, key, value), F.intention(query, key, value, alpha=0))
    for code in (codes.cholesky, codes.ours):
        close(code(query, key, value), F.intention(query, key, value, alpha=1))
    for code in (codes.attention, codes.fused):
        close(code(query, key, value), F.attention(query, key, value))


def test_the_paper_repetitions_in_every_preset():
    assert all(config.repetitions >= 1809 for config in slowdown.PRESETS.values())
    assert slowdown.EXCLUSIVE


def test_sizes_are_log_uniform_and_reach_both_ends():
    config, generator = slowdown.Config(smallest=16, largest=31), torch.Generator().manual_seed(0)
    sizes = [slowdown.size(config, generator) for _ in range(4000)]
    assert (min(sizes), max(sizes)) == (16, 31)
    wide = slowdown.Config()
    logs = [math.log(slowdown.size(wide, generator)) for _ in range(4000)]
    assert statistics.fmean(logs) == pytest.approx((math.log(16) + math.log(724)) / 2, abs=0.06)


def test_threads_are_given_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        config = slowdown.Config(repetitions=7, smallest=3, largest=23)
        list(slowdown.run(Job("slowdown", config, "all", 0), Place()))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_summary_of_known_ratios():
    ratios = [2.0 ** (index / 10) for index in range(-20, 41)]  # 1/4 to 16, median 2
    found = {m.metric.split(", ", 1)[1]: m for m in slowdown.summary("inverse", "attention", ratios, [(3, 5)] * 61)}
    assert found["median"].value == pytest.approx(2)
    assert found["median"].interval[0] < 2 < found["median"].interval[1]
    assert found["10th percentile"].value == pytest.approx(2**-1.4)
    assert found["90th percentile"].value == pytest.approx(2**3.4)
    assert found["share in [1, 4]"].value == pytest.approx(21 / 61)
    assert found["share at most 4"].value == pytest.approx(41 / 61)
    assert sum(found["median"].data["counts"]) == 61
    assert slowdown.histogram([1e-9, 1e9])[0] == slowdown.histogram([1e-9, 1e9])[-1] == 1


def test_wilson_interval():
    """Newcombe 1998, table I: 81 of 263 is 0.2553 to 0.3662."""
    assert slowdown.wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)


def test_verdicts_of_made_up_slowdowns():
    def text(code: str, base: str, ratios: list[float]) -> list[str]:
        measures = slowdown.summary(code, base, ratios, [(16, 16)] * len(ratios))
        return verdicts(slowdown, [row(code, m.metric, m.value, interval=m.interval, data=m.data) for m in measures])

    assert text("jax_inverse", "jax_attention", [2.0] * 200)[:2] == ["holds", "not tested at this size"]
    assert text("inverse", "attention", [2.0] * 200)[1] == "holds"
    assert text("inverse", "attention", [2.0] * 150 + [7.0] * 50)[1] == "does not hold"
    assert text("inverse", "attention", [2.0] * 180 + [7.0] * 20)[1] == "not decided"
    assert text("inverse", "attention", [0.5] * 200)[1] == "holds"  # to be faster is no failure
    measures = slowdown.summary("inverse", "attention", [2.0] * 200, [(16, 16)] * 200)
    untested = "not tested at this size"
    assert verdicts(slowdown, [row("inverse", m.metric, m.value) for m in measures])[1] == untested  # no intervals
    assert text("intention", "attention", [0.5] * 200)[3] == "holds"
    assert text("intention", "fused", [9.0] * 200)[4] == "does not hold"


def test_jax_is_timed_where_it_is_asked_for():
    pytest.importorskip("jax")
    config = slowdown.Config(repetitions=2, smallest=8, largest=9, calls=1, jax=2)
    assert [job.model for job in slowdown.jobs(config)] == ["all", "jax"]
    assert [job.model for job in slowdown.jobs(slowdown.Config())] == ["all"]
    assert slowdown.jobs(config)[0].id == slowdown.jobs(dataclasses.replace(config, jax=0))[0].id
    found = list(slowdown.run(slowdown.jobs(config)[1], Place()))
    assert {(m.model, m.metric.split(",")[0]) for m in found} == {("jax_inverse", "slowdown over jax_attention")}
    assert found[0].value > 0
    with pytest.raises(ValueError, match="jax must be 0"):
        slowdown.Config(jax=1)


@pytest.mark.parametrize(("n", "d"), [(5, 3), (3, 5)])
def test_functions_of_jax_are_those_of_torch(n, d):
    jax = pytest.importorskip("jax")
    arrays = torch.randn(3, n, d, generator=torch.Generator().manual_seed(0))
    for ours, theirs in ((codes.attention, jitted.attention), (codes.inverse, jitted.inverse)):
        found = torch.from_numpy(np.array(theirs(jax, *(jax.numpy.asarray(x.numpy()) for x in arrays))))
        torch.testing.assert_close(found, ours(*arrays), rtol=1e-3, atol=1e-4)
