"""A few-shot learner trained from nothing, in 14 lines: python examples/fewshot_loop.py (needs the extra `lab`)"""

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from intention.fewshot import Conv4, EpisodeSampler, LsSvm, evaluate, normalise, unit
from intention.lab import data


def main() -> float:
    torch.manual_seed(0)
    parts = data.load(
        "built-in"
    ).parts  # characters of many scripts, (n, 28, 28, 1) of bytes; those of `test` are others
    train, test = parts["train"], parts["test"]

    # begin
    encoder, head = Conv4(size=28, channels=1), LsSvm(sharpness=5.0)
    images = TensorDataset(train.x)
    sampler = EpisodeSampler(images, way=5, shot=5, query=5, episodes=50, labels=train.y)
    optimiser = torch.optim.Adam([*encoder.parameters(), *head.parameters()], lr=1e-3)
    for (x,) in DataLoader(images, batch_sampler=sampler):
        support, labels, query, targets = sampler.split(unit(encoder(normalise(x))))
        loss = cross_entropy(head(support, labels, query), targets)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    encoder.eval()
    with torch.no_grad():
        features = encoder(normalise(test.x))
    found = evaluate(head, features, test.y, way=5, shot=5, query=15)
    # end
    print(found)
    return found.accuracy


if __name__ == "__main__":
    main()
