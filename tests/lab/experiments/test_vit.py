"""Images of a class in three parts, one network with three mixers, and claims that can fail."""

import dataclasses

import pytest
import torch

from intention.lab.core.place import Place
from intention.lab.core.results import Row
from intention.lab.data import Labelled
from intention.lab.experiments import vit
from intention.lab.experiments.base import PRESETS
from intention.lab.experiments.vit import model as models
from intention.lab.experiments.vit import task
from lab.made import rows_of, verdicts

UNTESTED = "not tested at this size"
SMALL = dataclasses.replace(vit.PRESETS["quick"], steps=2, batch=3, width=8, heads=2, layers=1, size=8, timed=1)
SIZES = {"classes": 7, "size": 12, "channels": 3, "patch": 4, "width": 10, "heads": 2, "layers": 1}


@pytest.fixture(scope="module")
def rows():
    return rows_of(vit, SMALL)


def test_the_parts_share_classes_and_no_image():
    whole = Labelled(torch.arange(93).view(-1, 1, 1, 1), torch.arange(93) % 3, ("a", "b", "c"))
    pools = task.split(whole, 0)
    assert torch.cat([pool.x.flatten() for pool in pools]).sort().values.tolist() == list(range(93))
    for pool, count in zip(pools, (25, 3, 3), strict=True):
        assert pool.y.bincount().tolist() == [count] * 3
        assert (pool.x.flatten() % 3 == pool.y).all()
    assert not torch.equal(pools.train.x, task.split(whole, 1).train.x)


@pytest.mark.parametrize("name", models.MODELS)
def test_only_the_mixer_differs_and_where_a_patch_is_matters(name):
    torch.manual_seed(0)
    model, images = models.ViT(name, **SIZES), torch.randint(256, (5, 12, 12, 3), dtype=torch.uint8)
    assert model(images).shape == (5, 7)
    assert not torch.allclose(model(images), model(images.roll(4, 1)), atol=1e-4)
    shared = {
        key: x.shape for key, x in models.ViT("attention", **SIZES).state_dict().items() if "self_attn" not in key
    }
    assert shared == {key: x.shape for key, x in model.state_dict().items() if "self_attn" not in key}


def test_it_learns_what_is_easy():
    torch.manual_seed(0)
    model = models.ViT("intention", **SIZES)
    y = torch.arange(28) % 7
    images = task.Images((36 * y).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 12, 12, 3), y)
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(60):
        optimiser.zero_grad()
        vit.loss(model, images).backward()
        optimiser.step()
    assert vit.right(model, images).mean() > 0.9


def test_presets_rows_and_drawings(rows):
    assert set(vit.PRESETS) == set(PRESETS)
    first = next(iter(vit.jobs(SMALL)))
    assert list(vit.run(first, Place())) == list(vit.run(first, Place()))
    figure, table = vit.plot(rows)
    assert figure.draw is not None
    figure.draw()
    assert table.table is not None
    assert [line[0] for line in table.table] == ["mixer", "Attention", "σIntention", "Intention"]
    assert vit.plot([]) == []
    assert {row.model for row in rows if row.metric == "slowdown"} == {"sigma_intention", "intention"}
    with pytest.raises(ValueError, match="multiple of patch"):
        dataclasses.replace(SMALL, size=10)
    with pytest.raises(ValueError, match="learning_rate must be > 0"):
        vit.Rate(0.0)


def found(model: str, *values: float, metric: str = "accuracy") -> list[Row]:
    return [
        Row("vit", "", "quick", {}, model, seed, metric, value, None, None, {"classes": 64})
        for seed, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("own", "expected"),
    [((0.38, 0.37, 0.39), "holds"), ((0.31, 0.30, 0.32), "does not hold"), ((0.38, 0.30, 0.36), "not decided")],
)
@pytest.mark.parametrize(("place", "model"), [(0, "intention"), (1, "sigma_intention")])
def test_a_mixer_is_compared_seed_by_seed(own, expected, place, model):
    baseline = found("attention", 0.35, 0.34, 0.36)
    assert verdicts(vit, [*baseline, *found(model, *own)])[place] == expected
    assert verdicts(vit, [*baseline[:2], *found(model, *own)])[place] == UNTESTED


def test_a_baseline_that_did_not_learn_is_not_beaten():
    rows = [*found("attention", 0.35, 0.02, 0.36), *found("intention", 0.5, 0.5, 0.5)]
    claim = vit.claims(rows)[0]
    assert claim.verdict == UNTESTED
    assert "did not learn" in claim.measured


def test_the_slowdown_is_at_most_four():
    assert verdicts(vit, found("intention", 2.0, 2.1, metric="slowdown"))[2] == "holds"
    assert verdicts(vit, found("intention", 5.0, 5.1, metric="slowdown"))[2] == "does not hold"
    assert set(verdicts(vit, [])) == {UNTESTED}
