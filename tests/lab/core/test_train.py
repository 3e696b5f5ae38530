"""The training loop: it learns, it stops cleanly, and a run that was killed goes on with the same bits."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from intention.lab.core import checkpoint, ranks
from intention.lab.core.files import LabError
from intention.lab.core.place import Place
from intention.lab.core.train import Diverged, Plan, train
from intention.lab.tasks import Episode

PLAN = Plan(steps=23, batch=6, learning_rate=0.01, warmup=3, evaluate_every=7)


def sample(batch: int, generator: torch.Generator) -> Episode:
    key = torch.randn(batch, 11, 3, generator=generator)
    return Episode(key, key, key[..., :2], key.sum(-1, keepdim=True))


def build(dropout: float = 0.2) -> nn.Module:
    torch.manual_seed(3)
    shared = nn.Linear(3, 7)  # under two names, as keys and queries share an embedding
    return nn.Sequential(nn.Sequential(shared), nn.Dropout(dropout), nn.Linear(7, 3), shared, nn.Linear(7, 1))


def loss(model: nn.Module, episode: Episode) -> Tensor:
    return (model(episode.key) - episode.target).square().mean()


def evaluate(model: nn.Module) -> dict[str, float]:
    return {"mse": float(loss(model, sample(13, torch.Generator().manual_seed(99))))}


def weights(model: nn.Module) -> list[Tensor]:
    return list(model.state_dict().values())


def go(
    folder: Path | None, plan: Plan = PLAN, dropout: float = 0.2, **place: object
) -> tuple[nn.Module, list[dict[str, float]]]:
    model = build(dropout)
    where = Place(folder, **place)  # type: ignore[arg-type]
    return model, train(model, sample, loss, plan, seed=1, place=where, evaluate=evaluate)


def test_it_learns_and_evaluates_when_asked() -> None:
    _, history = go(None, replace(PLAN, steps=200, evaluate_every=70))
    assert [entry["step"] for entry in history] == [0, 70, 140, 200]
    assert history[-1]["mse"] < 0.3 * history[0]["mse"]
    _, history = go(None, replace(PLAN, evaluate_every=0))
    assert [entry["step"] for entry in history] == [0, 23]


def test_evaluation_neither_trains_nor_changes_the_run() -> None:
    modes = []

    def look(model: nn.Module) -> dict[str, float]:
        modes.append((model.training, torch.is_grad_enabled()))
        return evaluate(model)

    one, two = build(), build()
    torch.manual_seed(5)
    train(one, sample, loss, PLAN, seed=1, place=Place(), evaluate=look)
    torch.manual_seed(5)
    train(two, sample, loss, PLAN, seed=1, place=Place())
    assert set(modes) == {(False, False)}
    assert one.training
    assert all(torch.equal(a, b) for a, b in zip(weights(one), weights(two), strict=True))


@pytest.mark.parametrize(
    ("plan", "step", "rate"),
    [
        (Plan(100, 1, 2.0), 0, 2.0),
        (Plan(100, 1, 2.0), 50, 1.0),
        (Plan(100, 1, 2.0, "constant"), 99, 2.0),
        (Plan(100, 1, 2.0, "constant", warmup=10), 4, 1.0),
        (Plan(60_000, 1, 2.0, "decay"), 10_000, 2.0),
        (Plan(60_000, 1, 2.0, "decay"), 30_000, 2.0 * 0.8**2),
        (Plan(600, 1, 2.0, "decay", decay_period=100), 300, 2.0 * 0.8**2),
    ],
)
def test_schedules(plan: Plan, step: int, rate: float) -> None:
    assert plan.rate(step) == pytest.approx(rate)


@pytest.mark.parametrize("clip", [0.5, 0.0])
def test_gradients_are_clipped(clip: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen with plain gradient descent: how far a step goes is the norm of the gradient."""
    monkeypatch.setattr(torch.optim, "Adam", torch.optim.SGD)
    model = build()
    before = [p.detach().clone() for p in model.parameters()]

    def steep(model: nn.Module, episode: Episode) -> Tensor:
        return 1e3 * loss(model, episode)

    train(model, sample, steep, Plan(1, 5, 0.01, "constant", clip=clip), seed=1, place=Place())
    moved = float(
        torch.cat([(a.detach() - b).flatten() for a, b in zip(model.parameters(), before, strict=True)]).norm()
    )
    if clip:
        assert moved == pytest.approx(0.5 * 0.01, rel=1e-3)
    else:
        assert moved > 1


@pytest.mark.parametrize(
    "options",
    [
        *({"steps": 0}, {"batch": 0}, {"learning_rate": 0.0}, {"clip": -1.0}, {"schedule": "linear"}, {"warmup": -1}),
        *({"learning_rate": float("inf")}, {"learning_rate": float("nan")}, {"clip": float("nan")}),
        *({"optimiser": "lion"}, {"weight_decay": -0.1}, {"weight_decay": float("nan")}),
    ],
)
def test_impossible_plans_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))}.*got"):
        replace(PLAN, **options)  # type: ignore[arg-type]


def test_a_loss_that_is_not_finite_stops_with_step_and_settings() -> None:
    model = build()

    def burst(model: nn.Module, episode: Episode) -> Tensor:
        value = loss(model, episode)
        return value / 0 if float(value.detach()) < 1 else value

    with pytest.raises(Diverged, match=r"the loss is inf at step \d+ of Plan\(steps=500.*learning_rate=0.01"):
        train(model, sample, burst, replace(PLAN, steps=500), seed=1, place=Place())


def test_sgd_adds_the_weight_decay_before_the_momentum() -> None:
    plan = Plan(5, 6, 0.03, "decay", decay_period=2, clip=0, optimiser="sgd", weight_decay=0.2)
    ours, theirs = build(0.0), build(0.0)
    train(ours, sample, loss, plan, seed=1, place=Place())
    generator = torch.Generator().manual_seed(2_000_001)
    weights_of = list(theirs.parameters())
    speeds = [torch.zeros_like(weight) for weight in weights_of]
    for step in range(5):
        slopes = torch.autograd.grad(loss(theirs, sample(6, generator)), weights_of)
        for weight, speed, slope in zip(weights_of, speeds, slopes, strict=True):
            speed.mul_(0.9).add_(slope + 0.2 * weight.detach())
            weight.data -= plan.rate(step) * speed
    for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("decay", "left"), [(0.0, 1.0), (0.5, (1 - 0.1 * 0.5) ** 3)])
def test_adam_decays_weights_beside_the_gradient(decay: float, left: float) -> None:
    """Without a gradient a decoupled decay takes the same share of every weight, large or small."""
    model, before = build(), build()
    plan = Plan(3, 2, 0.1, "constant", weight_decay=decay)
    train(model, sample, lambda model, episode: 0 * loss(model, episode), plan, seed=1, place=Place())
    for one, two in zip(model.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(one, left * two)


class Killed(Exception):
    pass


def keeping(folder: Path | None, plan: Plan, best: float, kill: int = -1) -> tuple[nn.Module, list[dict[str, float]]]:
    """The score is largest where the error is `best`. A run that is killed has no time to save anything."""

    def look(model: nn.Module) -> dict[str, float]:
        error = evaluate(model)["mse"]
        return {"mse": error, "score": -abs(error - best)}

    def tell(step: int, steps: int, values: object) -> None:
        if step == kill:
            raise Killed

    model = build()
    torch.manual_seed(5)
    place = Place(folder, save_every=0.0, tell=tell)
    return model, train(model, sample, loss, plan, seed=1, place=place, evaluate=look)


@pytest.mark.parametrize("options", [{}, {"optimiser": "sgd", "weight_decay": 0.01}])
def test_the_best_weights_are_kept_also_by_a_killed_run(tmp_path: Path, options: dict[str, object]) -> None:
    plan = replace(PLAN, **options)  # type: ignore[arg-type]
    last, plain = keeping(None, plan, 0.0)
    best = plain[2]["mse"]
    assert [entry["step"] for entry in plain] == [0, 7, 14, 21, 23]
    kept = replace(plan, keep="score")
    model, history = keeping(tmp_path / "whole", kept, best)
    assert [entry["mse"] for entry in history] == [entry["mse"] for entry in plain]
    with torch.no_grad():
        assert evaluate(model.eval())["mse"] == pytest.approx(best, rel=1e-5)  # those of step 14
    assert not torch.equal(weights(model)[0], weights(last)[0])
    for kill in (10, 18):  # before and after the best
        folder = tmp_path / str(kill)
        with pytest.raises(Killed):
            keeping(folder, kept, best, kill)
        again, same = keeping(folder, kept, best)
        assert same == history
        assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(again), strict=True))
        assert (folder / checkpoint.NAME).read_bytes() == (tmp_path / "whole" / checkpoint.NAME).read_bytes()
    finished, _ = keeping(tmp_path / "whole", kept, best)
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(finished), strict=True))


def test_of_equal_evaluations_the_last_is_kept() -> None:
    def level(model: nn.Module) -> dict[str, float]:
        return {"score": 1.0}

    one, two = build(0.0), build(0.0)
    train(one, sample, loss, replace(PLAN, keep="score"), seed=1, place=Place(), evaluate=level)
    train(two, sample, loss, PLAN, seed=1, place=Place(), evaluate=level)
    assert all(torch.equal(a, b) for a, b in zip(weights(one), weights(two), strict=True))


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_weights_that_are_frozen_hinder_no_resumed_run(tmp_path: Path, optimiser: str) -> None:
    plan = replace(PLAN, optimiser=optimiser)

    def frozen(folder: Path | None, kill: int = -1) -> nn.Module:
        def tell(step: int, steps: int, values: object) -> None:
            if step == kill:
                raise Killed

        model = build(0.0)
        model[2].requires_grad_(False)  # type: ignore[index]
        train(model, sample, loss, plan, seed=1, place=Place(folder, save_every=0.0, tell=tell))
        return model

    with pytest.raises(Killed):
        frozen(tmp_path, 10)
    whole = frozen(None)
    assert all(torch.equal(a, b) for a, b in zip(weights(frozen(tmp_path)), weights(whole), strict=True))
    assert torch.equal(whole[2].weight, build(0.0)[2].weight)  # type: ignore[index]


SCRIPT = """
import os, signal, sys, torch
sys.path.insert(0, {tests!r})
import test_train
torch.set_num_threads(1)
def kill(step, steps, values):
    if step == {step}:
        os.kill(os.getpid(), signal.{kind})
try:
    test_train.go(test_train.Path({folder!r}), save_every=0.0, tell=kill)
except KeyboardInterrupt:  # Python's own way to end then is lost where torch imports tabulate at the exit
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
"""


def in_process(folder: Path, step: int, kind: str = "SIGKILL") -> subprocess.CompletedProcess[str]:
    code = SCRIPT.format(tests=str(Path(__file__).parent), folder=str(folder), step=step, kind=kind)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("kind", ["SIGKILL", "SIGINT"])
def test_a_killed_run_goes_on_with_the_same_bits(tmp_path: Path, kind: str) -> None:
    killed = in_process(tmp_path / "killed", 10, kind)
    assert killed.returncode == -getattr(signal, kind), killed.stderr
    saved = checkpoint._read(tmp_path / "killed" / checkpoint.NAME)[0]["step"]
    assert saved == (9 if kind == "SIGKILL" else 10)  # Ctrl-C saves, kill -9 cannot
    again, whole = in_process(tmp_path / "killed", -1), in_process(tmp_path / "whole", -1)
    assert again.returncode == whole.returncode == 0, again.stderr + whole.stderr
    # weights, optimiser, random states and history are all in this one file
    assert (tmp_path / "killed" / checkpoint.NAME).read_bytes() == (tmp_path / "whole" / checkpoint.NAME).read_bytes()


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    model, history = go(tmp_path)
    told: list[int] = []
    again, same = go(tmp_path, tell=lambda step, steps, values: told.append(step))
    assert not told
    assert same == history
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(again), strict=True))


def test_a_checkpoint_of_other_settings_is_not_continued(tmp_path: Path) -> None:
    go(tmp_path)
    before = (tmp_path / checkpoint.NAME).read_bytes()
    with pytest.raises(LabError, match=r"other settings.*0\.01.*0\.02.*--fresh"):
        go(tmp_path, replace(PLAN, learning_rate=0.02))
    assert (tmp_path / checkpoint.NAME).read_bytes() == before


class Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.mkdir, (os.environ["HOSTILE"],))


@pytest.mark.parametrize("damage", ["cut", "flipped", "one bit", "pickle", "torch pickle", "empty", "text"])
def test_a_damaged_checkpoint_is_refused_and_kept(tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    go(tmp_path)
    path, proof = tmp_path / checkpoint.NAME, tmp_path / "executed"
    monkeypatch.setenv("HOSTILE", str(proof))
    whole = path.read_bytes()
    flipped = whole[:9] + bytes([whole[9] ^ 0xFF]) + whole[10:]
    broken = {
        "cut": whole[:-100],
        "flipped": flipped,
        "one bit": whole[:-200] + bytes([whole[-200] ^ 1]) + whole[-199:],  # of a weight or a random state
        "pickle": pickle.dumps(Hostile()),
        "empty": b"",
        "text": b"{}",
    }
    if damage == "torch pickle":
        torch.save(Hostile(), path)
    else:
        path.write_bytes(broken[damage])
    before = path.read_bytes()
    with pytest.raises(LabError, match=r"checkpoint\.safetensors is damaged or not a checkpoint.*--fresh"):
        go(tmp_path)
    assert path.read_bytes() == before
    assert not proof.exists()


@pytest.mark.parametrize(
    "changes",
    [{"step": -1}, {"step": 24}, {"step": "5"}, {"step": None}, {"history": 5}, {"settings": None}, {"digest": ""}],
)
def test_a_checkpoint_with_a_wrong_description_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    from safetensors.torch import save_file

    go(tmp_path)
    about, tensors = checkpoint._read(tmp_path / checkpoint.NAME)
    save_file(tensors, tmp_path / checkpoint.NAME, {"about": json.dumps(about | changes)})
    with pytest.raises(LabError, match=r"checkpoint\.safetensors .*--fresh"):
        go(tmp_path)


@pytest.mark.parametrize("left_out", ["optimiser", "random.tasks", "model.2"])
def test_a_checkpoint_of_which_a_part_is_missing_is_refused(tmp_path: Path, left_out: str) -> None:
    from safetensors.torch import save_file

    go(tmp_path)
    about, tensors = checkpoint._read(tmp_path / checkpoint.NAME)
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(left_out)}
    about["digest"] = checkpoint._digest(kept)
    save_file(kept, tmp_path / checkpoint.NAME, {"about": json.dumps(about)})
    with pytest.raises(LabError, match=r"(?s)does not fit this model.*--fresh"):
        go(tmp_path)


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go(tmp_path)
    path = tmp_path / checkpoint.NAME
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    model = build()
    state = checkpoint.State(model, torch.optim.Adam(model.parameters()), torch.Generator(), 1, [])
    with pytest.raises(LabError, match=r"cannot write .*checkpoint.safetensors: No space left.*still there"):
        checkpoint.save(path, state, {})
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [checkpoint.NAME]


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(LabError, match=r"cannot write .*file.*--out"):
        go(tmp_path / "file" / "runs", save_every=0.0)


def test_events_are_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    go(tmp_path, tensorboard=True)
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert {"loss", "learning rate", "mse"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 24))


RANKS = """
import sys, torch
sys.path.insert(0, {tests!r})
torch.set_num_threads(1)
import test_train
from intention.lab.core import ranks
test_train.go(test_train.Path({folder!r}), dropout=0.0)
assert ranks.count() == 2
torch.distributed.barrier()  # gloo may abort in a rank whose neighbour has gone
ranks.leave()
"""


def test_two_ranks_train_to_the_parameters_of_one(tmp_path: Path) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "ranks"
    script.write_text(RANKS.format(tests=str(Path(__file__).parent), folder=str(folder)))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    about, tensors = checkpoint._read(folder / checkpoint.NAME)
    model, history = go(None, dropout=0.0)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensors[f"model.{name}"], tensor, atol=1e-5, rtol=1e-5)
    assert [entry["mse"] for entry in about["history"]] == pytest.approx([entry["mse"] for entry in history], rel=1e-4)


def test_a_batch_that_cannot_be_shared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "count", lambda: 2)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(LabError, match="a batch of 5 tasks cannot be shared by 2 ranks; use a multiple of 2"):
        ranks.share(sample(5, torch.Generator()))
    shared = sample(1, torch.Generator()).query
    mine = ranks.share(Episode(shared, *(torch.arange(6.0).reshape(6, 1, 1),) * 3))
    assert mine.query is shared
    assert mine.key.flatten().tolist() == [3.0, 4.0, 5.0]
