"""A time series that changes. With text and pictures: docs/tutorials/stream.md"""

import matplotlib.pyplot as plt
import torch

import intention

# The series
torch.manual_seed(0)
N = 600
angle = torch.linspace(0.3, 1.2, N)
series = torch.zeros(N + 2)
series[:2] = torch.randn(2)
for t in range(N):
    series[t + 2] = 1.96 * angle[t].cos() * series[t + 1] - 0.98 * series[t] + 0.1 * torch.randn(())
past = torch.stack([series[1:-1], series[:-2]], -1)  # (N, 2): what is known before value t
value = series[2:, None]

# All at once, with and without forgetting
query, key, known = past[1:], past[:-1], value[:-1]
errors = {}
for decay in (1.0, 0.99, 0.95, 0.8):
    rates = None if decay == 1 else torch.full((len(key),), decay)
    guess = intention.causal_intention(query, key, known, alpha=1e-2, decay=rates)
    errors[decay] = (guess - value[1:]).square()[50:].mean().item()
    print(f"decay {decay:4}: mean squared error {errors[decay]:.4f} (noise alone 0.0100)")


# A value at a time
best = min(errors, key=lambda decay: errors[decay])
state = intention.CausalState.empty(2, 1, alpha=1e-2)
answers = []
for t in range(len(key)):
    answer, state = state.step(query[t], key[t], known[t], decay=torch.tensor(best))
    answers.append(answer)
whole = intention.causal_intention(query, key, known, alpha=1e-2, decay=torch.full((len(key),), best))
print("largest difference:", (torch.stack(answers) - whole).abs().max().item())

# How sure?
recent = intention.fit(past[-60:], value[-60:], alpha="loo")
error = recent.leave_one_out()
noise = error.square().mean()
print(f"leave-one-out error {noise:.4f}, alpha {recent.alpha.item():.2g}")
level = noise / recent.alpha  # variance() is in units of the prior
ahead, spread, last = [], [], past[-1:]
for _ in range(40):
    guess = recent(last)
    ahead.append(guess.item())
    spread.append((level * recent.variance(last, noise=True)).sqrt().item())
    last = torch.cat([guess, last[:, :1]], -1)


ahead, spread, steps = torch.tensor(ahead), torch.tensor(spread), torch.arange(N, N + 40)
plt.figure(figsize=(7, 2.6))
plt.plot(torch.arange(N - 120, N), value[-120:].flatten(), color="black", linewidth=1, label="seen")
plt.plot(steps, ahead, color="#E08A00", label="prediction, step by step")
plt.fill_between(steps, ahead - 2 * spread, ahead + 2 * spread, color="#E08A00", alpha=0.2, label="one step's spread")
plt.ylim(-1, 1.4)
plt.legend(frameon=False, loc="upper left", ncols=3)
plt.show()
