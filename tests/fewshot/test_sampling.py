"""Episodes: balanced, no support among the queries, the same by seed and with workers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from intention.fewshot import EpisodeSampler, episodes

WAY, SHOT, QUERY = 3, 2, 5


def labels() -> Tensor:
    """Five classes of 7 to 11 examples in no order, and one that is too small; labels are far apart."""
    each = torch.cat([torch.full((7 + i,), 1000 * i + 3) for i in range(5)] + [torch.full((4,), 77)])
    return each[torch.randperm(len(each), generator=torch.Generator().manual_seed(0))]


def test_episodes_are_balanced_and_have_no_image_twice() -> None:
    y = labels()
    x = torch.stack([torch.arange(len(y)), y], 1).float()
    found = episodes(x, y, way=WAY, shot=SHOT, query=QUERY, count=101)
    assert found.support.shape == (101, WAY * SHOT, 2)
    assert found.query.shape == (101, WAY * QUERY, 2)
    for task in range(101):
        assert len(set(found.chosen[task].tolist())) == WAY * (SHOT + QUERY)
        assert len(set(found.classes[task].tolist())) == WAY
    own = found.classes.gather(1, found.labels), found.classes.gather(1, found.targets)
    assert torch.equal(own[0].float(), found.support[..., 1])
    assert torch.equal(own[1].float(), found.query[..., 1])
    assert torch.equal(torch.cat([found.support, found.query], 1)[..., 0].long(), found.chosen)
    assert found.labels[0].bincount().tolist() == [SHOT] * WAY
    assert found.targets[0].bincount().tolist() == [QUERY] * WAY
    assert set(found.classes.flatten().tolist()) == {3, 1003, 2003, 3003, 4003}  # the small class never
    assert set(found.chosen.flatten().tolist()) == set((y != 77).nonzero().flatten().tolist())  # all others, sometimes


def test_episodes_by_seed() -> None:
    y = labels()
    x = torch.arange(len(y)).float()[:, None]
    options = {"way": WAY, "shot": SHOT, "query": QUERY, "count": 7}
    one, same, other = (episodes(x, y, seed=seed, **options) for seed in (5, 5, 6))
    assert all(map(torch.equal, one, same))
    assert not torch.equal(one.chosen, other.chosen)
    generator = torch.Generator().manual_seed(5)
    first, second = (episodes(x, y, seed=generator, **options) for _ in range(2))
    assert torch.equal(first.chosen, one.chosen)
    assert not torch.equal(second.chosen, one.chosen)


class Named(Dataset):
    """A data set of another kind: its labels have a name, its members are tuples."""

    def __init__(self, name: str) -> None:
        self.x = torch.arange(len(labels())).float()
        setattr(self, name, labels().tolist())

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index], int(labels()[index])


@pytest.mark.parametrize("name", ["targets", "labels"])
def test_labels_are_found_in_the_data(name: str) -> None:
    data = Named(name)
    sampler = EpisodeSampler(data, way=WAY, shot=SHOT, query=QUERY, episodes=11)
    assert len(sampler) == 11
    batches = list(DataLoader(data, batch_sampler=sampler))
    assert len(batches) == 11
    for x, y in batches:
        support, own, query, targets = sampler.split(y)
        assert support.shape == own.shape == (WAY * SHOT,)
        assert query.shape == targets.shape == (WAY * QUERY,)
        classes = support[::SHOT]
        assert torch.equal(classes[own], support)
        assert torch.equal(classes[targets], query)
        assert len(set(x.tolist())) == len(x)


def test_workers_make_no_difference_also_after_a_break() -> None:
    data = TensorDataset(torch.arange(len(labels())), labels())
    found = []
    for workers in (0, 2):
        sampler = EpisodeSampler(data, way=WAY, shot=SHOT, query=QUERY, episodes=13, labels=labels(), seed=3)
        loader = DataLoader(data, batch_sampler=sampler, num_workers=workers)
        for number, (x, _) in enumerate(loader):
            found.append((workers, x))
            if number == 4:
                break
        found += [(workers, x) for x, _ in loader]
    one, two = ([x for workers, x in found if workers == which] for which in (0, 2))
    assert len(one) == len(two) == 5 + 13
    assert all(map(torch.equal, one, two))
    assert not torch.equal(one[0], one[5])  # another pass has other episodes


def test_wrong_data_is_told() -> None:
    data = TensorDataset(torch.zeros(30, 2), torch.arange(30) % 3)
    with pytest.raises(ValueError, match="neither targets nor labels"):
        EpisodeSampler(data)
    with pytest.raises(ValueError, match="one integer label for each of 30 members"):
        EpisodeSampler(data, labels=[1, 2, 3])
    with pytest.raises(ValueError, match=r"3 classes with at least 2 \+ 5 .* 5-way episodes need 5; .* 10 to 10"):
        EpisodeSampler(data, way=5, shot=2, query=5, labels=data.tensors[1])
    with pytest.raises(ValueError, match="way must be at least 2"):
        EpisodeSampler(data, way=1, shot=2, query=5, labels=data.tensors[1])
    with pytest.raises(ValueError, match="integer labels"):
        episodes(torch.zeros(5, 2), torch.zeros(5))
