import dataclasses
import os

import pytest
import torch

from intention.lab import data
from intention.lab.core.files import LabError
from intention.lab.core.place import Place
from intention.lab.core.results import Row
from intention.lab.data import Data, Labelled
from intention.lab.experiments import anomaly as experiment
from intention.lab.experiments.anomaly import model as models
from intention.lab.experiments.anomaly import task as anomaly
from intention.lab.experiments.anomaly.claims import PRINTED
from intention.lab.experiments.base import Job
from intention.lab.run.runner import Task, perform

CONFIG = dataclasses.replace(
    experiment.PRESETS["quick"],
    data="built-in",
    seeds=2,
    layers=(1, 4),
    items=5,
    dims=11,
    steps=3,
    batch=7,
    width=16,
    hidden=13,
    evaluation_sets=499,
    evaluations=1,
    learning_rate=0.5,  # a warm-up of 100 steps has only begun
)

REAL = data.load


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def features(classes=20, each=13, d=7, seed=0):
    """Each item holds its class and its own number, so that a set tells where its items are from."""
    x = torch.randn(classes * each, d, generator=generator(seed))
    x[:, 0], x[:, 1] = torch.arange(classes).repeat_interleave(each), torch.arange(classes * each)
    return Labelled(x, torch.arange(classes).repeat_interleave(each), tuple(map(str, range(classes))))


def pool(**sizes):
    part = features(**sizes)
    return anomaly.Pool.of(part.x, part.y)


# ---- sets


def test_a_set_has_one_item_of_another_class_and_no_item_twice():
    sets = anomaly.sample(pool(), 501, generator(), items=10)
    assert sets.items.shape == (501, 10, 7)
    label, number = sets.items[..., 0], sets.items[..., 1]
    odd = label.gather(1, sets.outlier[:, None])
    others = label[torch.arange(10) != sets.outlier[:, None]].view(501, 9)
    assert (others == others[:, :1]).all()
    assert (odd != others[:, :1]).all()
    assert all(len(row.unique()) == 10 for row in number)


def test_place_and_classes_of_the_outlier_are_uniform():
    sets = anomaly.sample(pool(), 20_000, generator(), items=10)
    assert (sets.outlier.bincount(minlength=10) / 20_000 - 0.1).abs().max() < 0.01
    odd = sets.items[..., 0].gather(1, sets.outlier[:, None]).squeeze(-1).long()
    assert (odd.bincount(minlength=20) / 20_000 - 0.05).abs().max() < 0.008


def test_sets_are_seeded():
    first, again, other = (anomaly.sample(pool(), 11, generator(seed), mixed=0.5) for seed in (1, 1, 2))
    assert torch.equal(first.items, again.items)
    assert torch.equal(first.outlier, again.outlier)
    assert not torch.equal(first.items, other.items)


def test_distinct_numbers_are_uniform_and_differ():
    count = torch.tensor([3, 5]).repeat_interleave(10_000)
    chosen = anomaly.distinct(count, 3, generator())
    assert (chosen[:10_000].sort(-1).values == torch.arange(3)).all()
    assert all(len(set(row)) == 3 for row in chosen[10_000:10_300].tolist())
    assert (chosen[10_000:].flatten().bincount(minlength=5) / 30_000 - 0.2).abs().max() < 0.01


def test_virtual_classes_are_mixed_item_by_item():
    eye = torch.eye(7).repeat_interleave(11, 0)  # class c is the unit vector c
    made = anomaly.Pool.of(eye, torch.arange(7).repeat_interleave(11))
    sets = anomaly.sample(made, 400, generator(), items=6, mixed=0.5)
    assert torch.allclose(sets.items.norm(dim=-1), torch.ones(400, 6))
    parts = (sets.items > 0).sum(-1)
    assert ((parts == 2).all(-1) | (parts == 1).all(-1)).all()  # a whole set is mixed, or none of it
    assert 0.4 < (parts == 2).float().mean() < 0.6
    own = sets.items[torch.arange(6) != sets.outlier[:, None]].view(400, 5, 7)
    assert torch.allclose(own, own[:, :1].expand_as(own))  # one weight for all items of a class
    odd = sets.items[torch.arange(400), sets.outlier]
    assert ((odd > 0) & (own[:, 0] > 0)).sum() == 0  # no class is in both
    shares = (own[:, 0] / own[:, 0].sum(-1, keepdim=True)).flatten()
    shares = shares[(shares > 0) & (shares < 1)]
    assert shares.quantile(torch.tensor([0.25, 0.75])).tolist() == pytest.approx([0.25, 0.75], abs=0.06)


# ---- data


@pytest.mark.parametrize("validate", [False, True])
def test_seen_and_unseen_classes_never_mix(validate):
    train, test = features(), features(each=17, seed=1)
    test.x[:, 1] += 1000
    whole = Data("mine", {"train": train, "test": test}, by_class=False)
    kept = []
    for seed in (0, 1):
        # the mean and the axes are fitted; what a row is follows from its place
        parts = anomaly._split_classes(whole, generator(anomaly.SPLITS + seed), 10, validate)
        classes = [set(y.tolist()) for _, y in parts]
        assert classes[0] == classes[1]
        assert not classes[0] & classes[2]
        assert len(classes[2]) == 3
        assert len(classes[0]) == (14 if validate else 17)
        assert (parts[0][0][:, 1] < 1000).all()  # training has no image of the other part
        assert (parts[1][0][:, 1] >= 1000).all()
        assert len(parts[2][0]) == 3 * (13 + 17)  # all images of the unseen classes
        kept.append(classes[2])
    assert kept[0] != kept[1]
    if validate:  # and the classes of the results are not among those of validation
        real = anomaly._split_classes(whole, generator(anomaly.SPLITS), 10, False)
        assert not set(real[2][1].tolist()) & kept[0]


def test_images_kept_back_are_not_trained_on():
    whole = Data("mine", {"train": features(each=24)}, by_class=False)
    fit, kept, asked = anomaly._split_classes(whole, generator(), 5, False)
    assert not set(fit[0][:, 1].tolist()) & set(kept[0][:, 1].tolist())
    assert (kept[1].bincount(minlength=20)[kept[1].unique()] == 4).all()
    assert len(fit[0]) + len(kept[0]) + len(asked[0]) == 20 * 24


def test_parts_with_classes_of_their_own():
    parts = {name: features(classes=5, each=30, seed=seed) for seed, name in enumerate(("train", "val", "test"))}
    whole = Data("mine", parts, by_class=True)
    found, other = (anomaly.split(whole, 0, dims=7, items=4, validate=validate) for validate in (False, True))
    assert found.train.x.shape[-1] == 7
    assert torch.allclose(found.unseen.x.norm(dim=-1), torch.ones(150))
    assert torch.equal(found.train.x, other.train.x)
    assert not torch.equal(found.unseen.x, other.unseen.x)
    del parts["test"]
    with pytest.raises(LabError, match="has no part 'test', only train, val"):
        anomaly.split(whole, 0, dims=7, items=4)


def test_axes_are_principal_components_of_training():
    x = torch.randn(400, 3, generator=generator()) @ torch.diag(torch.tensor([1.0, 9.0, 3.0])) + 5
    part = Labelled(x, torch.arange(400) % 5, tuple("abcde"))
    whole = Data("mine", {"train": part, "test": part}, by_class=True)
    found = anomaly.split(whole, 0, dims=2, items=4)
    wanted = torch.nn.functional.normalize((x - x.mean(0))[:, [1, 2]], dim=-1)
    assert (found.unseen.x.abs() - wanted[part.y.argsort(stable=True)].abs()).abs().median() < 0.1


def test_rules_see_the_same_sets_with_all_of_their_features():
    whole = Data("mine", {"train": features(each=30)}, by_class=False)
    few, all_of_them = (anomaly.split(whole, 3, dims=dims, items=4) for dims in (2, 0))
    assert all_of_them.unseen.x.shape[-1] == 7
    assert torch.equal(few.unseen.start, all_of_them.unseen.start)
    asked = (anomaly.sample(pools.unseen, 97, generator(), items=4) for pools in (few, all_of_them))
    assert torch.equal(*(sets.outlier for sets in asked))
    assert torch.allclose(all_of_them.unseen.x.norm(dim=-1), torch.ones(90))


def test_data_with_too_few_images_say_so():
    whole = Data("mine", {"train": features(each=15)}, by_class=False)
    with pytest.raises(LabError, match="images for training have 17 classes, the smallest with 6 images; sets of 10"):
        anomaly.split(whole, 0, dims=7)
    whole = Data("mine", {"train": features(classes=6, each=30)}, by_class=False)
    with pytest.raises(LabError, match="unseen classes have 1 classes"):
        anomaly.split(whole, 0, dims=7)


# ---- rules


def test_rules_on_sets_made_by_hand():
    near = torch.tensor([[1.0, 0.0], [0.96, 0.28], [0.96, -0.28], [0.0, 1.0]])  # the last one is the odd one
    assert anomaly.lowest_cosine(near[None]).argmax() == 3
    assert anomaly.lonely(near[None]).argmax() == 3
    # two far ones that are each other's neighbours, and one that is alone between the groups
    pairs = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
    assert anomaly.lonely(pairs[None]).argmax() == 5
    assert anomaly.lowest_cosine(pairs[None]).argmax() in (3, 4)
    assert torch.allclose(anomaly.lonely(near[None])[0], torch.tensor([-0.96, -0.96, -0.96, -0.28]))


def test_the_largest_distance_to_the_mean_is_the_cosine_rule():
    items = torch.nn.functional.normalize(torch.randn(101, 7, 5, generator=generator()), dim=-1)
    distance = (items - items.mean(-2, keepdim=True)).norm(dim=-1)
    assert torch.equal(distance.argmax(-1), anomaly.lowest_cosine(items).argmax(-1))


def test_whitening_makes_classes_rounder():
    x = torch.randn(2000, 3, generator=generator()) * torch.tensor([9.0, 3.0, 1.0])
    y = torch.arange(2000) % 4
    made = anomaly.Pool.of(x + 100 * torch.nn.functional.one_hot(y, 4)[:, :3], y)  # what is between them does not count
    deviation = (x @ anomaly.whitening(made)).std(0)
    assert deviation[0] / deviation[1] == pytest.approx(3**0.5, rel=0.1)  # halfway


# ---- models


@pytest.mark.parametrize("start", models.STARTS)
@pytest.mark.parametrize("name", models.MODELS)
def test_the_order_of_the_items_does_not_matter(name, start):
    torch.manual_seed(0)
    model = models.build(name, 7, layers=2, width=24, hidden=11, start=start).eval().double()
    items, order = torch.randn(3, 10, 7, dtype=torch.double), torch.randperm(10)
    assert torch.allclose(model(items[:, order]), model(items)[:, order])
    assert model(items).std() > 1e-3  # and it tells items apart


@pytest.mark.parametrize("width", [14, 16, 40])
def test_the_start_keeps_the_angles(width):
    """Queries are linear in the features, those of keys are the same, and attention takes the mean away."""
    torch.manual_seed(0)
    model = models.build("attention", 7, width=width, hidden=11, heads=2, start="geometry")
    layer = model.former.layers[0]
    x = torch.randn(11, 7)

    def query_and_key(x):
        inside = torch.relu(layer.embed_input(model.project(x)))
        return torch.nn.functional.linear(inside, layer.self_attn.in_proj_weight).chunk(3, -1)[:2]  # pyright: ignore[reportAttributeAccessIssue]

    query, key = query_and_key(x)
    assert torch.equal(query, key)
    assert torch.allclose(query_and_key(-2 * x)[0], -2 * query, atol=1e-5)
    assert query.std() > 0.01
    # with queries of 0 it is the mean itself
    layer.self_attn.in_proj_weight.data[: 2 * width] = 0  # pyright: ignore[reportAttributeAccessIssue, reportIndexIssue]
    stream = model.project(x)
    inside = torch.relu(layer.embed_input(stream))[None]
    left = (stream + layer.self_attn(inside, inside, inside)[0][0]).detach()
    half = width // 2
    assert torch.allclose(left[:, : min(half, 7)], x - x.mean(0), atol=1e-5)
    assert torch.equal(left[:, half:], torch.ones(11, width - half))


def test_unknown_models_are_refused():
    with pytest.raises(ValueError, match="there is no -former 'informer'"):
        models.build("informer", 7)


# ---- the experiment


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": ("informer",)}, "there is no model informer"),
        ({"layers": ()}, "layers must name at least one depth"),
        ({"layers": (0, 1)}, "layers must be at least 1"),
        ({"items": 2}, "items must be at least 3"),
        ({"dims": -1}, "dims must be at least 0"),
        ({"width": 18}, "width must be a multiple of heads, got 18 and 4"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\)"),
        ({"mixed": 1.5}, r"mixed must be in \[0, 1\]"),
        ({"start": "zero"}, "start must be one of"),
        ({"weight_decay": -1.0}, "weight_decay must be >= 0"),
        ({"batch": 0}, "batch must be at least 1"),
    ],
)
def test_impossible_configs_fail_with_a_reason(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


@pytest.fixture(scope="module")
def few_glyphs():
    """A slice of the built-in data, every third line and column of few images."""
    whole = data.load("built-in")
    parts = {name: Labelled(x.x[:400, ::3, ::3], x.y[:400], x.classes) for name, x in whole.parts.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment.data, "load", lambda name: Data(name, parts, by_class=True))
        yield


@pytest.fixture(scope="module")
def rows(tmp_path_factory, few_glyphs):
    out = tmp_path_factory.mktemp("rows")
    return [row for job in experiment.jobs(CONFIG) for row in perform(Task(job, experiment, "quick", out), Place())]


def test_rows_hold_what_the_figures_read(rows):
    trained = [row for row in rows if row.metric == "accuracy" and row.data.get("recipe") == "ours"]
    assert len(trained) == 5 * 2 * 2 * 2  # models, depths, seeds, kinds of classes
    plain = [row for row in rows if row.metric == "accuracy" and row.data.get("recipe") == "plain"]
    assert {(row.model, row.seed, row.data["layers"]) for row in plain} == {(model, 0, 1) for model in models.MODELS}
    rules = {row.model: row for row in rows if row.run.startswith("rules") and row.data["asked"] == "unseen"}
    assert set(rules) == {"cosine", "nearest", "whitened", "chance"}
    assert rules["chance"].value == 0.2
    assert rules["cosine"].value > 0.3
    for row in trained:
        assert row.interval[0] < row.value < row.interval[1]
        assert row.config["data"] == "built-in"


def test_the_recipes_differ(rows):
    found = {
        recipe: [
            row.value for row in rows if (row.data.get("recipe"), row.seed, row.data.get("layers")) == (recipe, 0, 1)
        ]
        for recipe in ("ours", "plain")
    }
    assert len(found["ours"]) == len(found["plain"])
    assert found["ours"] != found["plain"]


def test_a_run_repeats_bit_by_bit(few_glyphs):
    job = Job("anomaly", CONFIG, "sigma_intention", 1, {"data": "built-in", "layers": 1})
    assert list(experiment.run(job, Place())) == list(experiment.run(job, Place()))
    other = dataclasses.replace(job, seed=0)
    assert list(experiment.run(job, Place())) != list(experiment.run(other, Place()))


def test_all_models_of_a_seed_answer_the_same_sets(monkeypatch, few_glyphs):
    asked = []
    actual = experiment._found
    monkeypatch.setattr(experiment, "_found", lambda model, sets: asked.append(sets.items) or actual(model, sets))
    for model in ("attention", "intention"):
        list(experiment.run(Job("anomaly", CONFIG, model, 1, {"data": "built-in", "layers": 1}), Place()))
    half = len(asked) // 2
    assert all(torch.equal(a, b) for a, b in zip(asked[:half], asked[half:], strict=True))
    assert not torch.equal(asked[0], asked[1])


def test_claims_and_figures_from_rows(rows):
    claims = experiment.claims(rows)
    assert len(claims) == 12
    assert all(claim.measured for claim in claims[:6])
    plots = experiment.plot(rows)
    assert [plot.title for plot in plots] == ["Accuracy", "Accuracy by model", "Accuracy during training"]
    assert "built-in data (glyphs)" in plots[0].caption
    assert {len(line) for line in plots[0].table} == {9}
    assert len(plots[0].table) == 1 + 5 + 4
    for plot in plots[1:]:
        plot.draw().canvas.draw()


@pytest.mark.parametrize("kept", [{"attention"}, {"cosine"}, {"intention", "neural_process"}, set()])
def test_missing_rows_are_not_tested_and_do_not_crash(rows, kept):
    some = [row for row in rows if row.model in kept and row.data.get("layers") != 4]
    verdicts = [claim.verdict for claim in experiment.claims(some)]
    assert set(verdicts[:4]) == {"not tested at this size"}
    assert verdicts[5] == "not tested at this size"
    for plot in experiment.plot(some):
        if plot.draw is not None:
            plot.draw().canvas.draw()


def made_up(accuracy, seeds=2, sets=4000, kinds=(("unseen", 0.0), ("seen", 0.1))):
    """(model, layers) -> share on unseen classes; seen ones are a tenth above."""
    found = []
    for (model, layers), share in accuracy.items():
        for seed in range(seeds):
            for asked, more in kinds:
                about = {"sets": sets, "asked": asked, **({"layers": layers, "recipe": "ours"} if layers else {})}
                value = share + more + 0.001 * seed
                found.append(Row("anomaly", "", "quick", {}, model, seed, "accuracy", value, data=about))
    return found


AS_PRINTED = {(model, layers): both[layers > 1] for model, both in PRINTED.items() for layers in (1, 4)}
UNTESTED = "not tested at this size"


def verdicts(accuracy, **options):
    return [claim.verdict for claim in experiment.claims(made_up(accuracy, **options))][:6]


FAR = {  # every claim, by five points
    (model, layers): 0.6 + 0.05 * place + 0.05 * (layers > 1)
    for place, model in enumerate(("neural_process", "linear_attention", "intention", "attention", "sigma_intention"))
    for layers in (1, 4)
}


def test_verdicts_follow_the_numbers():
    low = ("cosine", 0)
    assert verdicts({**FAR, low: 0.6}) == ["holds", "holds", "holds", "holds", "does not hold", "holds"]
    opposite = {key: 1.4 - share for key, share in FAR.items()}
    assert verdicts({**opposite, low: 0.5}) == [*["does not hold"] * 5, "holds"]
    assert verdicts({**FAR, low: 0.9})[5] == "does not hold"
    assert verdicts({**FAR, ("attention", 1): 0.95})[3] == "does not hold"  # better than most is not the best
    assert verdicts({**FAR, low: 0.6}, seeds=1) == ["not decided"] * 6  # one seed says nothing of the others


def test_both_splits_are_judged():
    rows = made_up({**FAR, ("cosine", 0): 0.6}, kinds=(("images", 0.1),))
    found = experiment.claims(rows)
    assert [claim.verdict for claim in found[:6]] == [UNTESTED] * 6
    assert [claim.verdict for claim in found[6:]] == ["holds"] * 6
    assert all("split over images" in claim.text for claim in found[6:])
    plots = experiment.plot(rows)
    assert plots[0].table[0][1:3] == ["1 layer, images", "4 layers, images"]
    plots[1].draw().canvas.draw()


def test_what_knows_less_than_the_rule_has_not_learnt():
    rule = {("cosine", 0): 0.62}  # 0.72 on seen classes, where NP-Former with one layer has 0.7
    assert verdicts({**FAR, **rule})[:4] == ["holds in 4 of 5 (1 open)", "holds", "holds", UNTESTED]
    worse = {**FAR, **rule, ("attention", 1): 0.95}
    assert verdicts(worse)[3] == "does not hold"  # whatever the others are


def test_printed_numbers_say_less_than_the_text():
    # with so many sets that nothing is left to chance
    found = verdicts(AS_PRINTED, sets=10**8)
    assert found[:3] == ["holds in 4 of 5 (1 open)", "holds in 3 of 4", "holds in 3 of 4"]
    assert found[3:] == ["holds", "holds", UNTESTED]


def test_what_sets_cannot_tell_apart_is_not_decided():
    same = {(model, layers): 0.75 for model in models.MODELS for layers in (1, 4)}
    assert verdicts({**same, ("cosine", 0): 0.745})[:4] == ["not decided"] * 4
    assert verdicts({**same, ("cosine", 0): 0.745})[5] == "not decided"
    few = {("attention", 1): 0.70, ("attention", 4): 0.75}
    claim = experiment.claims(made_up(few, seeds=1, sets=200))[0]
    assert "Transformer +5.0 ± 8.7" in claim.measured


def test_seeds_that_differ_widen_the_interval():
    """Student's over two seeds: 12.7 times the standard error."""
    rows = made_up({("attention", 1): 0.70, ("attention", 4): 0.75}, sets=10**6)
    wide = [dataclasses.replace(row, value=row.value - 0.09 * row.seed * (row.data["layers"] == 4)) for row in rows]
    assert "Transformer +0.5 ± 57.2" in experiment.claims(wide)[0].measured


@pytest.mark.skipif("INTENTION_DATA" not in os.environ, reason="INTENTION_DATA is not set")
def test_features_of_cifar_are_split_by_label():
    assert data.choose("auto", "cifar100-features") == "cifar100-features"
    pools = anomaly.split(REAL("cifar100-features"), 0, dims=32)
    assert [len(part.count) for part in (pools.train, pools.seen, pools.unseen)] == [83, 83, 17]
    assert [int(part.count[0]) for part in (pools.train, pools.seen, pools.unseen)] == [500, 100, 600]
    images = anomaly.over_images(REAL("cifar100-features"), 0, dims=32)
    assert [len(part.count) for part in (images.train, images.images)] == [100, 100]
    assert [int(part.count[0]) for part in (images.train, images.images)] == [500, 100]


def test_a_split_over_images_trains_on_all_classes():
    found = anomaly.over_images(data.load("built-in"), 0, dims=8)
    assert torch.equal(found.train.count.new_tensor(len(found.train.count)), torch.tensor(len(found.images.count)))
    assert found.unseen is None
    config = dataclasses.replace(CONFIG, splits=("labels", "images"), seeds=1, layers=(1,), models=("attention",))
    jobs = list(experiment.jobs(config))
    assert [(job.model, job.at.get("split")) for job in jobs if job.at.get("recipe") is None] == [
        *(("rules", None), ("attention", None), ("rules", "images"), ("attention", "images"))
    ]
    assert jobs[0].id == next(iter(experiment.jobs(dataclasses.replace(config, splits=("labels",))))).id
    measured = list(experiment.run(jobs[-1], Place()))
    assert {m.data["asked"] for m in measured if m.metric == "accuracy"} == {"images"}
    own = dataclasses.replace(config, attention=dataclasses.replace(config.attention, learning_rate=0.5))
    assert own.plan("attention").learning_rate == 0.5
    assert own.plan("intention").learning_rate == config.learning_rate
    with pytest.raises(ValueError, match="splits must be of"):
        dataclasses.replace(CONFIG, splits=("colours",))


def test_an_interval_of_two_seeds_does_not_flatten_the_figure():
    rows = [
        dataclasses.replace(row, value=0.9 if row.seed else 0.4) if row.model == "attention" else row
        for row in made_up(FAR)
    ]
    drawn = next(plot for plot in experiment.plot(rows) if plot.title == "Accuracy by model").draw()
    low, high = drawn.axes[0].get_ylim()
    assert low > -0.1
    assert high < 1.1
