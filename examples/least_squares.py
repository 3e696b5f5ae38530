"""Least squares in a network, in ten minutes. With text and pictures: docs/tutorials/least_squares.md"""

import matplotlib.pyplot as plt
import torch
from torch import nn

from intention import functional as F
from intention.nn import Intention, LearnableAlpha, mlp

# One call
torch.manual_seed(0)
key = torch.rand(20, 1)
value = 3 * key + 0.02 * torch.randn(20, 1)
query = torch.tensor([[1.5], [2.0]])
print("truth    ", (3 * query).flatten().tolist())
print("Intention", F.intention(query, key, value, alpha=1e-3).flatten().tolist())
print("attention", F.attention(query, key, value).flatten().tolist())


# Gradients go through the fit
def curves(tasks: int, points: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = 12 * torch.rand(tasks, points, 1) - 6
    amplitude, phase = 5 * torch.rand(tasks, 1, 1), 3 * torch.rand(tasks, 1, 1)
    return x, amplitude * torch.sin(x - phase)


embed = mlp(1, 64, 64, 64)
model = Intention(LearnableAlpha(1.0), embed_query=embed, embed_key=embed)
optimiser = torch.optim.Adam(model.parameters(), 3e-3)
losses = []
for _ in range(400):
    x, y = curves(16, 40)
    loss = (model(x, x[:, :10], y[:, :10]) - y).square().mean()
    optimiser.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    losses.append(loss.item())
print(f"loss at the start {losses[0]:.2f}, at the end {sum(losses[-20:]) / 20:.3f}")

# A new curve from ten points
torch.manual_seed(5)
x, y = curves(1, 10)
grid = torch.linspace(-6, 6, 200)[None, :, None]
with torch.no_grad():
    fitted = model(grid, x, y)
plt.figure(figsize=(7, 2.6))
plt.plot(grid.flatten(), fitted.flatten(), color="#E08A00", label="Intention")
plt.plot(x.flatten(), y.flatten(), "o", color="black", label="seen")
plt.legend(frameon=False)
plt.show()
