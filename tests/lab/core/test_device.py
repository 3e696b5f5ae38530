"""Devices: which there are, what is moved where, and that a checkpoint goes from one to another."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from intention.lab.core import device
from intention.lab.core.checkpoint import State, load, save
from intention.lab.core.device import answer, find, moved, of
from intention.lab.core.files import LabError
from intention.lab.core.place import Place
from intention.lab.core.train import Plan, train

META = torch.device("meta")  # another device, which every torch has; its tensors have shapes and no numbers


class Two(NamedTuple):
    x: Tensor
    y: Tensor


def test_a_device_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert find("auto") == find("cuda") == torch.device("cuda", 0)
    assert find("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(LabError, match=r"cuda:2: this machine has 2 GPU.s., numbered from 0"):
        find("cuda:2")
    monkeypatch.setattr(device.ranks, "count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert find("cuda") == torch.device("cuda", 1)  # under torchrun the rank's own
    assert find("cuda:0") == torch.device("cuda", 0)


def test_a_device_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert find("auto") == torch.device("cpu")
    for name, message in (
        ("cuda", "wants a GPU"),
        ("mps", "wants a GPU of Apple"),
        ("gpu", "there is no device 'gpu'"),
    ):
        with pytest.raises(LabError, match=message):
            find(name)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert find("auto") == find("mps") == torch.device("mps")


def test_tasks_go_where_the_model_is() -> None:
    there = moved(Two(torch.ones(2), torch.ones(3)), META)
    assert isinstance(there, Two)
    assert [part.device for part in there] == [META, META]
    assert of(nn.Linear(2, 3, device=META)) == META
    assert of(nn.Identity()) == torch.device("cpu")
    found = answer(nn.Linear(2, 3), torch.ones(5, 2))
    assert found.shape == (5, 3)
    assert not found.requires_grad


def test_training_moves_the_model_and_its_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the loss: a number cannot be read from the meta device."""
    seen: list[torch.device] = []

    def loss(model: nn.Module, batch: Two) -> Tensor:
        seen.extend([*(part.device for part in batch), of(model)])
        raise InterruptedError

    def sample(batch: int, generator: torch.Generator) -> Two:
        return Two(torch.randn(batch, 2, generator=generator), torch.ones(batch))

    with pytest.raises(InterruptedError):
        train(nn.Linear(2, 1), sample, loss, Plan(1, 3, 0.1), seed=0, place=Place(device=META))
    assert seen == [META] * 3


def test_a_checkpoint_is_of_no_device(tmp_path: Path) -> None:
    """What is saved is on the CPU, and what is loaded goes where the model is."""

    def state(place: str) -> State:
        model = nn.Linear(2, 1).to(place)
        return State(model, torch.optim.Adam(model.parameters()), torch.Generator(), 0, [])

    path, here = tmp_path / "checkpoint", state("cpu")
    here.model(torch.ones(1, 2)).sum().backward()
    here.optimiser.step()
    here.step = 1
    save(path, here, {"steps": 3})
    there = state("meta")
    with pytest.warns(UserWarning, match="no-op"):  # torch's, of weights that have no numbers
        load(path, there, {"steps": 3})
    slots = there.optimiser.state_dict()["state"][0]
    assert slots["exp_avg"].device == META
    assert of(there.model) == META
    again = state("cpu")
    load(path, again, {"steps": 3})
    assert torch.equal(again.model.weight, here.model.weight)  # pyright: ignore[reportArgumentType]
