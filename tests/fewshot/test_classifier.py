"""The classifier: what comes and goes equals a fit of what is there, and what the examples say of each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from intention.fewshot import FewShotClassifier, Kernel, LsSvm, Prototypes, unit
from intention.fewshot.columns import Linear

N, D, C = 61, 17, 5


def points(n: int = N, d: int = D, classes: int = C, seed: int = 0) -> tuple[Tensor, list[str]]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    centres = 2 * torch.randn(classes, d, generator=torch.Generator().manual_seed(9))
    x = centres[labels] + torch.randn(n, d, generator=generator)
    return x, [f"class {index}" for index in labels.tolist()]


@pytest.mark.parametrize("head", [LsSvm(0.7), LsSvm("loo"), Kernel("gaussian", 0.3)])
def test_predictions_are_those_of_the_head(head: LsSvm) -> None:
    x, names = points()
    model = FewShotClassifier(head=head).fit(x, names)
    query, truth = points(23, seed=1)
    labels = torch.tensor([model.classes.index(name) for name in names])
    scores = head(unit(x), labels, unit(query))
    torch.testing.assert_close(model.decision(model.features(query)), scores, atol=1e-5, rtol=1e-5)
    assert model.predict(query) == [model.classes[index] for index in scores.argmax(-1).tolist()]
    assert sum(a == b for a, b in zip(model.predict(query), truth, strict=True)) > 15
    chances = model.predict_proba(query)
    torch.testing.assert_close(chances.sum(-1), torch.ones(23))
    torch.testing.assert_close(chances, (scores / model.temperature).softmax(-1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("head", [LsSvm(0.7), Kernel("gaussian", 0.3)])
@pytest.mark.parametrize("d", [7, 90])
def test_added_and_removed_points_are_a_fit_of_what_is_there(head: LsSvm, d: int) -> None:
    """d = 7: by features, and one point is few enough for an update; d = 90: by points."""
    x, names = points(d=d)
    query = points(11, d=d, seed=1)[0]
    kernel = head.solve.kernel is not None
    model = FewShotClassifier(head=head).fit(x[:40], names[:40])
    model.add(x[40:], names[40:])
    whole = FewShotClassifier(head=head).fit(x, names)
    if not kernel:  # a kernel without a width of its own finds it in the first points
        torch.testing.assert_close(model.decision(model.features(query)), whole.decision(whole.features(query)))
    model.remove(x[40:], names[40:])
    part = FewShotClassifier(head=head).fit(x[:40], names[:40])
    torch.testing.assert_close(
        model.decision(model.features(query)), part.decision(part.features(query)), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize(("n", "d"), [(200, 90), (41, 90)])
def test_a_new_class_is_a_new_column(n: int, d: int) -> None:
    x, names = points(n, d)
    more, _ = points(7, d, 1, seed=3)
    query = points(11, d, seed=1)[0]
    model = FewShotClassifier().fit(x, names)
    before = model.decision(model.features(query))
    model.add(more, ["another"] * 7)
    assert model.classes == (*(f"class {i}" for i in range(C)), "another")
    assert before.shape == (11, C)
    assert (model._linear is not None) == (n >= d)  # by features w is updated
    whole = FewShotClassifier().fit(torch.cat([x, more]), names + ["zother"] * 7)
    found, wanted = model.decision(model.features(query)), whole.decision(whole.features(query))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    model.add(x[:3] + 0.01, names[:3]).remove(x[:3] + 0.01, names[:3])  # and goes on from there
    torch.testing.assert_close(model.decision(model.features(query)), wanted, atol=1e-5, rtol=0)


def test_many_updates_stay_exact() -> None:
    x, names = points(120, 37)
    model = FewShotClassifier().fit(x[:60], names[:60])
    for i in range(60, 120):
        model.add(x[i : i + 1], names[i : i + 1])
    assert model._linear is not None
    exact = Linear.of(model.context)
    assert exact is not None
    torch.testing.assert_close(model._linear.w, exact.w, atol=1e-9, rtol=1e-7)
    torch.testing.assert_close(model._linear.inverse, exact.inverse, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("d", [7, 90])
def test_leave_one_out_is_fitting_without_each(d: int) -> None:
    x, names = points(29, d)
    model = FewShotClassifier(head=LsSvm(0.5)).fit(x, names)
    scores = []
    for i in range(29):
        rest = [j for j in range(29) if j != i]
        part = FewShotClassifier(head=LsSvm(0.5)).fit(x[rest], [names[j] for j in rest])
        scores.append(part.decision(part.features(x[i : i + 1])))
    torch.testing.assert_close(model.left_out(), torch.cat(scores), atol=1e-5, rtol=1e-5)
    right = [model.classes[int(s.argmax())] == name for s, name in zip(scores, names, strict=True)]
    assert model.leave_one_out() == pytest.approx(sum(right) / 29)


def test_wrong_labels_are_suspects() -> None:
    x, names = points(200, 40)
    wrong = [3, 50, 101, 155]
    for i in wrong:
        names[i] = f"class {(i + 2) % C}"
    model = FewShotClassifier().fit(x, names)
    found = model.suspects(4)
    assert sorted(one.example for one in found) == wrong
    assert [one.margin for one in found] == sorted(one.margin for one in found)
    assert all(one.label == names[one.example] and one.predicted == f"class {one.example % C}" for one in found)


def test_the_temperature_has_the_smallest_cross_entropy() -> None:
    x, names = points(80, 11)
    model = FewShotClassifier().fit(x + 3 * torch.randn(80, 11, generator=torch.Generator().manual_seed(5)), names)
    own = torch.tensor([model.classes.index(name) for name in names])
    left = model.left_out()
    losses = [
        float(torch.nn.functional.cross_entropy(left / (model.temperature * factor), own)) for factor in (0.9, 1.0, 1.1)
    ]
    assert losses[1] < min(losses[0], losses[2])


def test_influences_add_up() -> None:
    x, names = points()
    model = FewShotClassifier().fit(x, names)
    query = points(5, seed=1)[0]
    scores = model.decision(model.features(query))
    value = model.context.value
    assert value is not None
    level = value.mean(0)[scores.argmax(-1)]
    total = model.influences(model.features(query)).sum(-1).float() + level
    torch.testing.assert_close(total, scores.amax(-1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head", [LsSvm("loo"), Kernel("gaussian", 0.3)])
def test_saved_and_loaded(head: LsSvm, tmp_path: Path) -> None:
    x, names = points()
    model = FewShotClassifier(head=head).fit(x, names)
    model.add(x[:3] - 5, ["new"] * 3)
    model.save(tmp_path / "model.safetensors")
    again = FewShotClassifier.load(tmp_path / "model.safetensors")
    assert again.classes == model.classes
    torch.testing.assert_close(again.predict_proba(x), model.predict_proba(x), atol=1e-6, rtol=1e-5)
    assert again.add(x[:2], names[:2]).predict(x) is not None
    (tmp_path / "text").write_text("model")
    with pytest.raises(ValueError, match="is not a classifier of ours"):
        FewShotClassifier.load(tmp_path / "text")
    with pytest.raises(FileNotFoundError, match="cannot read the classifier"):
        FewShotClassifier.load(tmp_path / "absent")


def test_wrong_use_is_told() -> None:
    x, names = points()
    with pytest.raises(ValueError, match="call fit"):
        FewShotClassifier().predict(x)
    with pytest.raises(ValueError, match="two or more classes"):
        FewShotClassifier().fit(x, ["one"] * N)
    with pytest.raises(ValueError, match="61 images and 60 labels"):
        FewShotClassifier().fit(x, names[:-1])
    with pytest.raises(TypeError, match="Prototypes"):
        FewShotClassifier(head=Prototypes())
    with pytest.raises(ValueError, match="for images give one"):
        FewShotClassifier().fit(torch.zeros(3, 28, 28, 3, dtype=torch.uint8), [0, 1, 2])
    model = FewShotClassifier().fit(x, names)
    with pytest.raises(ValueError, match="17 features, got 5"):
        model.add(x[:, :5], names)
    with pytest.raises(ValueError, match="no class 'yak'"):
        model.remove(x[:1], ["yak"])
    with pytest.raises(ValueError, match="NaN"):
        model.predict(x * torch.nan)
