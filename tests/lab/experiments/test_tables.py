"""Made-up tasks and tables, networks of one size, and claims that can fail."""

import dataclasses

import pytest
import torch

from intention.lab.core.place import Place
from intention.lab.core.results import Row
from intention.lab.experiments import tables
from intention.lab.experiments.base import PRESETS
from intention.lab.experiments.tables import model as models
from intention.lab.experiments.tables import task
from intention.lab.tasks import Episode
from lab.made import rows_of, verdicts

SMALL = dataclasses.replace(
    tables.PRESETS["quick"],
    steps=2,
    batch=3,
    evaluation_tasks=7,
    draws=5,
    rows=(11,),
    few_rows=7,
    intention=dataclasses.replace(tables.STANDARD.intention, embed=(6, 5)),
    attention=dataclasses.replace(tables.STANDARD.attention, embed=(6, 5), decode=(4, 1)),
)
UNTESTED, HOLDS, NOT = "not tested at this size", "holds", "does not hold"


@pytest.fixture(scope="module")
def rows():
    return rows_of(tables, SMALL)


def test_made_up_tasks_are_standardised_over_their_context_and_can_be_learnt():
    episode = task.sample(300, torch.Generator().manual_seed(0), fewest=61, most=61, queries=13)
    torch.testing.assert_close(episode.value.mean(-2), torch.zeros(300, 1), atol=1e-5, rtol=0)
    torch.testing.assert_close(episode.value.std(-2, correction=0), torch.ones(300, 1), atol=1e-5, rtol=0)
    empty = (episode.key == 0).all(1)  # (B, d): columns that are not there
    assert set(empty.sum(-1).tolist()) == set(range(9))
    assert (episode.query[empty.unsqueeze(1).expand(-1, 13, -1)] == 0).all()
    error = (models.ridge(episode) - episode.target).square().mean()
    assert 0.2 < error < 0.8 * episode.target.square().mean()


def test_draws_of_a_table_have_all_of_its_rows():
    episode = task.drawn_from("linnerud", 15, 6, torch.Generator().manual_seed(0))
    assert [tuple(x.shape) for x in episode] == [(6, 5, 10), (6, 15, 10), (6, 15, 1), (6, 5, 1)]
    x, y = task.table("linnerud")
    assert x.shape == (20, 10)
    assert (x[:, 3:] == 0).all()
    known = [(each - each.mean()) / each.std(correction=0) for each in y.mT]
    for number in range(6):  # targets take turns; what is asked for is not in the context
        both = torch.cat([episode.value[number], episode.target[number]]).flatten()
        both = ((both - both.mean()) / both.std(correction=0)).sort().values
        torch.testing.assert_close(both, known[number % 3].sort().values, atol=1e-4, rtol=1e-4)
    assert task.table("diabetes")[0].shape == (442, 10)


def test_networks_have_one_size():
    sizes = [
        sum(x.numel() for x in models.build(name, getattr(tables.STANDARD, name), 1.0).parameters())
        for name in models.MODELS
    ]
    assert max(sizes) <= 1.03 * min(sizes)


def test_nearest_rows_choose_how_many():
    generator = torch.Generator().manual_seed(0)
    key, query = torch.randn(2, 41, 3, generator=generator), torch.randn(2, 11, 3, generator=generator)
    noise = torch.randn(2, 41, 1, generator=generator)
    smooth = Episode(query, key, torch.where(torch.arange(2).view(2, 1, 1) == 0, key[..., :1].sign(), noise), query)
    found = models.nearest_rows(smooth)
    place = torch.cdist(query, key).argsort(-1)
    averages = torch.stack(
        [torch.stack([smooth.value[b, place[b, :, :k], 0].mean(-1) for b in range(2)]) for k in models.NEIGHBOURS]
    )
    gaps = (averages.unsqueeze(-1) - found).abs().amax((-2, -1))  # (k, B)
    chosen = [models.NEIGHBOURS[i] for i in gaps.argmin(0).tolist()]
    torch.testing.assert_close(gaps.min(0).values, torch.zeros(2))
    assert chosen[1] == 15  # noise: the more the better
    assert chosen[0] < 15


def test_presets_rows_and_drawings(rows):
    assert set(tables.PRESETS) == set(PRESETS)
    first = next(iter(tables.jobs(SMALL)))
    assert list(tables.run(first, Place())) == list(tables.run(first, Place()))
    figure, numbers = tables.plot(rows)
    assert figure.draw is not None
    figure.draw()
    assert numbers.table is not None
    assert numbers.table[0] == ["", "diabetes, 11 rows", "linnerud, 7 rows"]
    assert len(numbers.table) == 6
    assert tables.plot([]) == []
    assert tables.finding([]) == ""
    with pytest.raises(ValueError, match="rows must be 2 to 400"):
        dataclasses.replace(SMALL, rows=(500,))


def found(model, *values, metric="error on a table"):
    data = {"table": "diabetes"} if metric != "mse" else None
    return [
        Row("tables", "", "quick", {}, model, seed, metric, value, 100.0 if data else None, None, data)
        for seed, value in enumerate(values)
    ]


def test_claims_can_fail():
    made_up = [*found("zero", 1.0, 1.0, metric="mse"), *found("attention", 0.5, 0.5, metric="mse")]
    others = [*found("ridge_loo", 0.5, 0.51), *found("attention", 0.6, 0.61), *found("nearest_rows", 0.7, 0.71)]
    ahead = [*made_up, *others, *found("intention", 0.5, 0.51)]
    assert verdicts(tables, ahead) == [HOLDS] * 3
    behind = [*made_up, *others, *found("intention", 0.8, 0.81)]
    assert verdicts(tables, behind) == [NOT] * 3
    unlearnt = [*found("zero", 1.0, 1.0, metric="mse"), *found("attention", 0.9, 0.9, metric="mse"), *ahead[4:]]
    assert verdicts(tables, unlearnt) == [HOLDS, UNTESTED, HOLDS]
    assert set(verdicts(tables, [])) == {UNTESTED}
    assert "Intention 0.505" in tables.finding(ahead)
