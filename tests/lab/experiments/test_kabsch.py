"""Generalised Kabsch: the task, its closed forms, point clouds, the models, and the experiment from end to end."""

import dataclasses
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from intention.lab.core.files import LabError
from intention.lab.core.place import Place
from intention.lab.core.results import Row
from intention.lab.experiments import kabsch as experiment
from intention.lab.experiments.base import Job, Net
from intention.lab.experiments.kabsch import clouds, references
from intention.lab.experiments.kabsch import model as models
from intention.lab.experiments.kabsch import task as kabsch
from intention.lab.models.references import zero

TINY = Net((7, 11), (5, 2), heads=3)
CONFIG = dataclasses.replace(
    experiment.PRESETS["quick"],
    seeds=2,
    steps=3,
    batch=5,
    evaluation_tasks=13,
    evaluations=3,
    **{name: TINY for name in models.MODELS if name != "mlp"},
    mlp=Net((), (7, 10)),
)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def rows_of(job):
    config = dataclasses.asdict(job.config)
    for made in experiment.run(job, Place()):
        name = made.model or job.model
        yield Row(
            "kabsch", job.id, "quick", config, name, job.seed, made.metric, made.value, made.x, made.interval, made.data
        )


@pytest.fixture(scope="module")
def rows():
    return [row for job in experiment.jobs(CONFIG) for row in rows_of(job)]


def mse(predicted, episode):
    return (predicted - episode.target).square().mean().item()


@pytest.mark.parametrize("dims", [2, 3])
def test_rotations_are_proper_and_uniform(dims):
    turn = kabsch.rotations(30_011, dims, generator())
    eye = torch.eye(dims).expand_as(turn)
    torch.testing.assert_close(turn @ turn.mT, eye, atol=1e-5, rtol=0)
    torch.testing.assert_close(turn.det(), torch.ones(30_011), atol=1e-5, rtol=0)
    # uniform: entries have mean 0 and variance 1/d, and an image of a fixed vector is as likely on either side
    assert turn.mean(0).abs().max() < 0.02
    assert (turn.var(0) - 1 / dims).abs().max() < 0.01
    assert turn.diagonal(dim1=-2, dim2=-1).sum(-1).mean().abs() < 0.03


@pytest.mark.parametrize("dims", [2, 3])
def test_the_task_is_a_similarity_with_noise_on_the_values_only(dims):
    given = {"points": 7, "queries": 11, "dims": dims}
    episode = kabsch.sample(4001, generator(), noise=0.05, **given)
    assert episode.query.shape == episode.target.shape == (4001, 11, dims)
    assert episode.key.shape == episode.value.shape == (4001, 7, dims)
    clear = kabsch.sample(4001, generator(), noise=0.0, **given)
    assert torch.equal(clear.target, episode.target)
    assert (episode.value - clear.value).std().item() == pytest.approx(0.05, rel=0.02)
    # distances are scaled by one factor in [0.5, 2) within a task
    stretch = torch.cdist(clear.target, clear.target) / torch.cdist(clear.query, clear.query)
    row, column = torch.triu_indices(11, 11, 1)
    stretch = stretch[:, row, column]
    assert (stretch.amax(-1) / stretch.amin(-1)).median() < 1.001
    assert 0.49 < stretch.median(-1).values.min() < 0.55
    assert 1.95 < stretch.median(-1).values.max() < 2.01


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("closed", [references.affine, references.umeyama])
def test_closed_forms_are_exact_without_noise(closed, dims):
    episode = kabsch.sample(501, generator(), dims=dims, noise=0.0)
    error = (closed(episode) - episode.target).abs().amax((-2, -1))
    assert error.median() < 1e-5
    assert error.mean() < 1e-3


@pytest.mark.parametrize("dims", [2, 3])
def test_closed_forms_with_noise_are_as_good_as_what_they_know(dims):
    episode = kabsch.sample(2003, generator(), dims=dims)
    assert mse(references.umeyama(episode), episode) < 0.5 * mse(references.affine(episode), episode) < 0.1
    assert mse(references.ridge_raw(episode), episode) > 1  # no intercept: it cannot translate
    assert mse(zero(episode), episode) > 2


def test_umeyama_never_reflects():
    """The points are mirrored: the best orthogonal matrix is a reflection, the best rotation is not."""
    key = torch.randn(101, 5, 2, generator=generator())
    value = key * torch.tensor([1.0, -1.0])
    unit = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]).expand(101, 3, 2)
    at = references.umeyama(kabsch.Episode(unit, key, value, unit))
    assert (torch.det((at[:, :2] - at[:, 2:]).mT) > 0).all()


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("name", models.MODELS)
def test_models_answer_every_query(name, dims):
    points, queries = 7, 11
    model = models.build(name, (13, 17), (5, 2), heads=3, dims=dims, points=points, queries=queries)
    episode = kabsch.sample(3, generator(), points=points, queries=queries, dims=dims)
    out = model(*episode[:3])
    assert out.shape == (3, queries, dims)
    out.square().sum().backward()
    assert [key for key, parameter in model.named_parameters() if parameter.grad is None] == []
    if name != "mlp":  # query-wise, and the order of the points does not matter
        torch.testing.assert_close(model(episode.query[:, :2], *episode[1:3]), out[:, :2], rtol=1e-3, atol=1e-4)
        mixed = model(episode.query, episode.key.flip(1), episode.value.flip(1))
        torch.testing.assert_close(mixed, out, rtol=1e-3, atol=1e-4)


def test_an_unknown_model_is_named():
    with pytest.raises(ValueError, match="there is no model 'svd'"):
        models.build("svd", (7,), (2,))


# ---- clouds


def test_the_rabbit_has_an_outline_an_inside_and_a_fixed_shape():
    first, again = (clouds.rabbit(401, generator()) for _ in range(2))
    assert first.points.shape == (401, 2)
    assert torch.equal(first.points, again.points)
    assert first.points.mean(0).abs().max() < 1e-5
    assert first.points.square().mean().item() == pytest.approx(1.0, rel=1e-4)
    drawn = first.back(first.points)
    line = clouds._bezier(torch.tensor(clouds.OUTLINE), 40)
    away = torch.cdist(drawn, line).amin(1)
    assert (away < 0.02).sum() > 250  # on the outline
    assert (away > 0.1).sum() > 50  # inside
    seen = line[None] - drawn[away > 0.1][:, None]
    angle = torch.atan2(seen[..., 1], seen[..., 0])
    turned = angle.roll(-1, 1) - angle
    winding = torch.atan2(turned.sin(), turned.cos()).sum(1) / (2 * torch.pi)
    assert (winding.abs() > 0.99).all()  # the line goes once around each of them


def test_the_curve_passes_through_its_places():
    through = torch.tensor(clouds.OUTLINE)
    line = clouds._bezier(through, 8)
    assert line.shape == (8 * len(through), 2)
    torch.testing.assert_close(line[::8], through)


POINTS = np.array(
    [[1.0, 2.0, 3.5], [4.0, -5.0, 6.0], [7.0, 8.0, 9.25], [0.5, 0.0, -1.0], [2.0, 2.0, 2.0], [3.0, 1.0, 4.0]]
)


def write_ply(path, form, points=POINTS, names="xyz"):
    properties = "".join(f"property float {name}\n" for name in names)
    header = (
        f"ply\nformat {form} 1.0\ncomment made here\nelement vertex {len(points)}\n{properties}property uchar red\n"
    )
    header += "element face 1\nproperty list uchar int vertex_indices\nend_header\n"
    if form == "ascii":
        body = "".join(" ".join(map(str, point)) + " 255\n" for point in points).encode() + b"3 0 1 2\n"
    else:
        body = b"".join(struct.pack(f"<{len(point)}fB", *point, 255) for point in points) + b"\x03" + bytes(12)
    path.write_bytes(header.encode() + body)


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("kind", ["npz", "npz named", "npy", "csv", "csv heading", "ply ascii", "ply binary"])
def test_a_users_cloud_is_read(tmp_path, kind, dims):
    points, names = POINTS[:, :dims], "xyz"[:dims]
    path = tmp_path / f"cloud.{kind.split()[0]}"
    if kind == "npz":
        np.savez(path, mine=points.astype(np.float32))
    elif kind == "npz named":
        np.savez(path, f=np.zeros((4, 3), int), v=points)
    elif kind == "npy":
        np.save(path, points)
    elif kind == "csv":
        # a spreadsheet's mark of the encoding must not make the first point a heading
        path.write_text("\ufeff" + "\n".join(",".join(map(str, point)) for point in points) + "\n\n", encoding="utf-8")
    elif kind == "csv heading":
        lines = [";".join(["id", *names]), *("a;" + ";".join(map(str, point)) for point in points)]
        path.write_text("\n".join(lines))
    else:
        write_ply(path, "ascii" if kind == "ply ascii" else "binary_little_endian", points, names)
    cloud = clouds.load_cloud(path)
    assert cloud.dims == dims
    torch.testing.assert_close(cloud.back(cloud.points), torch.tensor(points).float(), rtol=1e-5, atol=1e-5)
    assert cloud.points.mean(0).abs().max() < 1e-6
    assert cloud.points.square().mean().item() == pytest.approx(1.0, rel=1e-5)


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("kind", ["npz", "npy", "raw"])
def test_a_hostile_pickle_is_refused_and_does_not_run(tmp_path, kind):
    trap = tmp_path / "ran"
    path = tmp_path / ("cloud.npz" if kind != "npy" else "cloud.npy")
    if kind == "raw":
        path.write_bytes(pickle.dumps(Hostile(trap)))
    else:
        (np.savez if kind == "npz" else np.save)(path, np.array([Hostile(trap)], dtype=object))
    assert not trap.exists()
    with pytest.raises(LabError, match=f"{path.name}.*Pickled objects are refused"):
        clouds.load_cloud(path)
    assert not trap.exists()


def _save(name, content):
    def write(folder):
        path = folder / name
        if isinstance(content, np.ndarray):
            np.save(path, content)
        elif isinstance(content, dict):
            np.savez(path, **content)
        elif content is not None:
            path.write_bytes(content)
        return path

    return write


PLY = b"ply\nformat ascii 1.0\nelement vertex 3\nproperty float x\nproperty float y\nend_header\n"


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (_save("none.npz", None), "there is no file"),
        (_save("cloud.obj", b"v 1 2 3"), "wanted a file named .npz, .npy, .ply or .csv"),
        (_save("cut.npz", b"PK\x03\x04rubbish"), "not a file of plain numpy arrays"),
        (_save("empty.npy", b""), "not a file of plain numpy arrays"),
        (_save("wide.npy", np.zeros((5, 4))), r"wanted points as rows, .* got shape \(5, 4\)"),
        (_save("text.npy", np.array([["a", "b"]])), "wanted numbers"),
        (_save("nan.npy", np.array([[0.0, 1.0], [np.nan, 2.0], [3.0, np.inf]])), "2 of 3 points are not finite.*row 1"),
        (_save("same.npy", np.ones((5, 2))), "all points are the same"),
        (_save("huge.npy", np.array([[1e300, 0.0], [-1e300, 1.0]])), "too far apart"),
        (_save("one.npy", np.ones((1, 2))), "at least 2 points"),
        (_save("two.npz", {"a": np.zeros((5, 2)), "b": np.zeros((7, 3))}), r"holds a \(5, 2\), b \(7, 3\)"),
        (_save("word.csv", b"x,y\n1,2\n3,four\n"), "line 3: wanted 2 or 3 numbers"),
        (_save("ragged.csv", b"1,2\n3,4,5\n"), "line 2: wanted 2 numbers, got 3"),
        (_save("long.csv", b"1,2,3,4\n"), "line 1: wanted 2 or 3 numbers, got 4"),
        (_save("empty.csv", b""), "at least 2 points"),
        (_save("latin.csv", b"\xff\xfe\x00"), "cannot read"),
        (_save("not.ply", b"solid"), "is not a ply file"),
        (_save("cut.ply", PLY + b"1 2\n3 4\n5"), "does not hold its 3 vertices"),
        (_save("big.ply", PLY.replace(b"ascii", b"binary_big_endian")), "got binary_big_endian"),
        (_save("list.ply", PLY.replace(b"float y", b"list uchar int y")), "wanted plain properties"),
        (_save("line.ply", PLY.replace(b"float y", b"float u")), "wanted vertices with x, y"),
    ],
)
def test_a_file_that_does_not_serve_says_why(tmp_path, write, message):
    with pytest.raises(LabError, match=message) as caught:
        clouds.load_cloud(write(tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_a_folder_is_not_a_cloud(tmp_path):
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(LabError, match="cannot read"):
        clouds.load_cloud(tmp_path / "folder.npz")


def test_large_clouds_are_thinned_without_repetition():
    cloud = clouds.normalised(np.arange(2002.0).reshape(1001, 2), "line")
    some = cloud.thinned(101, generator())
    assert len(some) == len(some.unique(dim=0)) == 101
    assert len(cloud.thinned(5000, generator())) == 1001


# ---- the experiment


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": ("informer",)}, "there is no model informer"),
        ({"points": 2}, "points must be more than dims"),
        ({"dims": 4}, "dims must be 2 or 3"),
        ({"noise": -0.1}, "noise must be >= 0"),
        ({"smallest": 3.0}, "scale wants"),
        ({"alpha": -1.0}, "alpha must be > 0"),
        ({"queries": 0}, "queries must be at least 1"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"mlp": Net((), ())}, "mlp.decode must end with"),
        ({"mlp": Net((), (7, 3))}, "mlp.decode ends with"),
        ({"intention": Net((7,), (7, 3))}, "intention.decode ends with"),
    ],
)
def test_impossible_configs_fail_with_a_reason(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


def test_a_run_repeats_bit_by_bit():
    job = Job("kabsch", CONFIG, "intention", 1, {"dims": 2})
    assert list(experiment.run(job, Place())) == list(experiment.run(job, Place()))
    other = dataclasses.replace(job, seed=0)
    assert list(experiment.run(job, Place())) != list(experiment.run(other, Place()))


def test_held_out_tasks_are_not_those_of_training(monkeypatch):
    seeds = []

    def sample(batch, generator, **options):
        seeds.append(generator.initial_seed())
        return actual(batch, generator, **options)

    actual = kabsch.sample
    monkeypatch.setattr(kabsch, "sample", sample)
    for model, seed in (("intention", 1), ("mlp", 1), ("mlp", 0)):
        list(experiment.run(Job("kabsch", CONFIG, model, seed, {"dims": 2}), Place()))
    held_out, training = seeds[::4], [seed for place, seed in enumerate(seeds) if place % 4]
    assert held_out[0] == held_out[1] != held_out[2]
    assert not set(held_out) & set(training)


def test_rows_hold_what_the_figures_read(rows):
    trained = [row for row in rows if row.metric == "mse" and row.model in models.MODELS]
    assert len(trained) == len(models.MODELS) * 2
    assert {row.x for row in rows if row.metric == "mse during training"} == {0, 1, 2, 3}
    shown = next(row.data for row in rows if row.metric == "cloud")
    assert shown["name"] == "rabbit"
    assert len(shown["cloud"]) == len(shown["target"]) == len(shown["predicted"]) <= 400
    assert len(shown["key"]) == len(shown["value"]) == 5
    closed = {row.model: row.value for row in rows if row.metric == "relative error on the cloud" and row.seed == 0}
    assert closed["umeyama"] < 0.1 < closed["intention"]  # three steps are not enough to learn it


def test_claims_and_figures_from_rows(rows):
    claims = experiment.claims(rows)
    assert len(claims) == 6
    assert all(claim.measured for claim in claims)
    assert claims[-1].verdict == "holds"
    assert claims[1].verdict in ("does not hold", "not decided")  # three steps do not reach least squares
    plots = experiment.plot(rows)
    assert [plot.title for plot in plots] == ["Error during training", "Mapping a cloud: rabbit"]
    for plot in plots:
        plot.draw().canvas.draw()


@pytest.mark.parametrize("kept", [{"mlp"}, {"zero"}, {"neural_process", "affine"}, {"sigma_intention", "mlp"}, set()])
def test_missing_rows_are_not_tested_and_do_not_crash(rows, kept):
    wanted = [row for row in rows if row.model in kept]
    some = [row for row in wanted if row.metric in ("mse", "mse during training")]
    assert {claim.verdict for claim in experiment.claims(some)} == {"not tested at this size"}
    assert {claim.measured for claim in experiment.claims(some)} == {""}
    for plot in experiment.plot(some):
        plot.draw().canvas.draw()


def made_up(errors, dims=2):
    return [
        Row("kabsch", "", "quick", {}, model, seed, "mse", value, data={"dims": dims})
        for model, values in errors.items()
        for seed, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("baseline", "margin"),
    [
        ((0.1, 0.11, 0.1), "holds"),
        ((0.03, 0.031, 0.03), "does not hold"),  # ahead, not by a wide margin
        ((0.03, 0.09, 0.05), "not decided"),
        ((0.001, 0.001, 0.001), "does not hold"),
    ],
)
def test_verdicts_follow_the_numbers(baseline, margin):
    others = {"attention": (0.9, 0.8, 0.9), "neural_process": (0.9, 0.8, 0.9), "affine": (0.009, 0.009, 0.009)}
    rows = made_up({**others, "intention": (0.01, 0.011, 0.01), "mlp": baseline})
    verdicts = [claim.verdict for claim in experiment.claims(rows)]
    assert verdicts[:2] == [margin, "holds"]
    worse = made_up({"intention": (0.03, 0.03, 0.03), "affine": (0.009, 0.009, 0.009)})
    assert experiment.claims(worse)[1].verdict == "does not hold"
    idle = [*rows, *made_up({"zero": (1.0, 1.0, 1.0)})]  # attention and NP are hardly better than the mean
    claim = experiment.claims(idle)[0]
    assert claim.verdict == "not tested at this size"
    assert "Attention did not learn (2 of 3 runs)" in claim.measured


def test_in_space_affine_least_squares_is_no_measure():
    errors = {"intention": (0.01, 0.011, 0.01), "affine": (0.009, 0.009, 0.009)}
    claim = experiment.claims(made_up(errors, dims=3))[1]
    assert claim.verdict == "not tested at this size"
    assert "in 3-D: the error of affine least squares from 5 points has no mean" in claim.measured
    both = [*made_up(errors), *made_up(errors, dims=3)]
    assert experiment.claims(both)[1].verdict == "holds in 1 of 2 (1 open)"
    more = [dataclasses.replace(row, config={"points": 6}) for row in made_up(errors, dims=3)]
    assert experiment.claims(more)[1].verdict == "holds"
    few = [dataclasses.replace(row, config={"points": 4}) for row in made_up(errors)]
    assert experiment.claims(few)[1].verdict == "not tested at this size"


def on_cloud(values, model="intention", most=0.2):
    about = {"dims": 2, "cloud": "rabbit", "shown": 0.9, "most": most}
    name = "relative error on the cloud"
    return [Row("kabsch", "", "quick", {}, model, seed, name, value, data=about) for seed, value in enumerate(values)]


@pytest.mark.parametrize(
    ("medians", "expected"),
    [
        ((0.04, 0.05, 0.04), "holds"),  # the pictured map and the 90th percentile are worse than a tenth
        ((0.04, 0.09, 0.12), "not decided"),
        ((0.04,), "not decided"),
        ((0.2, 0.2, 0.2), "does not hold"),
        ((0.04, None, 0.04), "does not hold"),
    ],
)
def test_the_cloud_is_judged_by_the_median_of_its_maps(medians, expected):
    claim = experiment.claims([*on_cloud(medians), *on_cloud((0.03,) * len(medians), "affine", 0.07)])[2]
    assert claim.verdict == expected
    assert "median of 100 maps" in claim.text
    assert "affine least squares 3.0% (90th percentile 7.0%) from the same points" in claim.measured
    if expected == "holds":
        assert "Intention 4.3% (90th percentile 20.0%) over 3 seeds" in claim.measured
    assert experiment.claims(on_cloud((0.03,), "affine"))[2].verdict == "not tested at this size"


def test_the_legend_has_the_last_means(rows):
    (legend,) = experiment.plot(rows)[0].draw().legends
    last = [row.value for row in rows if (row.model, row.metric, row.x) == ("mlp", "mse during training", 3)]
    assert f"MLP: {np.exp(np.log(last).mean()):.2g}" in [text.get_text() for text in legend.get_texts()]


def test_a_users_cloud_decides_the_dimensions(tmp_path):
    path = tmp_path / "mine.npy"
    np.save(path, 100 + 3 * np.random.default_rng(0).normal(size=(601, 3)))
    config = dataclasses.replace(CONFIG, cloud=str(path), models=("intention", "mlp"), seeds=1)
    jobs = {job.model: job for job in experiment.jobs(config)}
    assert jobs["intention"].at["dims"] == jobs["mlp"].at["dims"] == 3
    assert "cloud" not in jobs["mlp"].at  # its runs do not depend on the cloud
    made = [row for job in jobs.values() for row in rows_of(job)]
    shown = next(row.data for row in made if row.metric == "cloud")
    assert len(shown["cloud"]) == 400
    assert np.array(shown["cloud"]).shape == np.array(shown["predicted"]).shape == (400, 3)
    assert np.array(shown["cloud"]).mean() == pytest.approx(100, abs=1)  # in the units of the file
    assert [plot.title for plot in experiment.plot(made)] == ["Error during training, 3-D", "Mapping a cloud: mine.npy"]
    for plot in experiment.plot(made):
        plot.draw().canvas.draw()
    np.save(path, np.random.default_rng(1).normal(size=(601, 3)))  # another cloud under the same name is another run
    assert {job.model: job.id for job in experiment.jobs(config)}["intention"] != jobs["intention"].id


def test_a_cloud_that_does_not_serve_fails_before_any_work(tmp_path):
    with pytest.raises(LabError, match="there is no file"):
        experiment.jobs(dataclasses.replace(CONFIG, cloud=str(tmp_path / "none.ply")))
    np.save(tmp_path / "few.npy", np.eye(3)[:, :2])
    with pytest.raises(LabError, match="has 3 points in 2-D, and 5 are observed"):
        experiment.jobs(dataclasses.replace(CONFIG, cloud=str(tmp_path / "few.npy")))


@pytest.mark.skipif("INTENTION_DATA" not in os.environ, reason="INTENTION_DATA is not set")
def test_the_stanford_bunny_is_read():
    cloud = clouds.load_cloud(Path(os.environ["INTENTION_DATA"]) / "bunny" / "bunny.npz")
    assert cloud.points.shape == (1839, 3)
