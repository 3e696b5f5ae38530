"""Write your own KVQ model. With text and pictures: docs/tutorials/kvq.md"""

from collections.abc import Callable

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

from intention import functional as F
from intention import naive

# The model
torch.manual_seed(0)


class Erf(nn.Module):
    """erf(e(Q) e(K)') V with one embedding of both."""

    def __init__(self, d: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Linear(d, width)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.erf(self.embed(query) @ self.embed(key).mT) @ value


model = Erf(3, 8).double()
query, key, value = torch.randn(5, 3).double(), torch.randn(11, 3).double(), torch.randn(11, 2).double()
embedded = naive.erf(model.embed(query), model.embed(key), value)
print("equals the formula:", torch.allclose(model(query, key, value), embedded))


# The symmetry
def is_kvq(f: Callable[..., Tensor]) -> bool:
    """Whether f keeps the symmetry on these data, for ten orders."""
    answer = f(query, key, value)
    for _ in range(10):
        pairs, asked = torch.randperm(11), torch.randperm(5)
        if not torch.allclose(f(query, key[pairs], value[pairs]), answer):
            return False
        if not torch.allclose(f(query[asked], key, value), answer[asked]):
            return False
    alone = torch.cat([f(query[i : i + 1], key, value) for i in range(5)])
    return torch.allclose(alone, answer)


def with_positions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.attention(q, k + 0.1 * torch.arange(len(k))[:, None], v)


candidates = {
    "erf": model,
    "attention": F.attention,
    "linear attention": F.linear_attention,
    "Intention": lambda q, k, v: F.intention(q, k, v, alpha=0.1),
    "σIntention": lambda q, k, v: F.sigma_intention(q, k, v, alpha=0.1),
    "attention with positions": with_positions,
    "centred by the queries": lambda q, k, v: F.intention(q - q.mean(0), k, v, alpha=0.1),
}
for name, f in candidates.items():
    print(f"{name:26s} {'is' if is_kvq(f) else 'is NOT'} a KVQ model")


# What they answer
x = torch.linspace(-2, 2, 15)[:, None]
line = torch.linspace(-3, 3, 200)[:, None]
y = 2 * x
answers = {
    "attention": F.attention(line, x, y),
    "erf": naive.erf(line, x, y) / len(x),
    "Intention": F.intention(line, x, y, alpha=0.1),
}
plt.figure(figsize=(7, 2.8))
for (name, answer), colour in zip(answers.items(), ("#2F7FD1", "#9B59B6", "#E08A00"), strict=True):
    plt.plot(line.flatten(), answer.flatten(), label=name, color=colour)
plt.plot(x.flatten(), y.flatten(), "o", color="black", markersize=3, label="pairs")
plt.legend(frameon=False)
plt.show()
