"""Few-shot classifiers: an encoder of images, a layer e_H on its features and a head that reads labelled examples.

Heads are those of `intention.fewshot`: the largest score is the answer. `loss` belongs to the head: least squares on +1
and -1, or cross-entropy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from intention.fewshot.encoders import Encoder, normalise
from intention.fewshot.heads import LsSvm, Matching
from intention.fewshot.maml import Maml
from intention.lab.experiments.fewshot.task import Shots
from intention.lab.models.attention import WideAttention, WideSigma
from intention.nn import LearnableAlpha, mlp

__all__ = [
    "SHARPNESS",
    "FewShot",
    "Folded",
    "ImageMaml",
    "Mixed",
    "Pretrained",
    "attention",
    "features_of",
    "mix",
    "score_loss",
    "start_as_in_jax",
]

LOSSES = ("mse", "cross-entropy")
FOLDED = 512  # widest input for which a factor of W'W is cheaper than W
SHARPNESS = 5.0  # where scores of the size of labels are read as logits: what they are multiplied by at the start


def features_of(encoder: Encoder, x: Tensor, mirrored: bool = False) -> Tensor:
    """Features (n, d) of images (n, h, w, c); mirrored: the mean of these and those of the mirror images."""
    found = encoder(normalise(x))
    return (found + encoder(normalise(x.flip(2)))) / 2 if mirrored else found


class FewShot(nn.Module):
    """Encoder, e_H and head.

    Args:
        encoder: None where the data are features.
        latent: size of e_H, a linear layer; 0 is none.
        by_distance: the head's answers depend on distances of embedded points only, so e_H may be `Folded`.

    Attributes:
        mirrored: in eval mode, an image is the mean of its features and those of its mirror image.
    """

    mirrored = False

    def __init__(
        self, encoder: Encoder | None, d: int, latent: int, head: nn.Module, loss: str, by_distance: bool = False
    ) -> None:
        super().__init__()
        self.encoder, self.head, self.loss_name = encoder, head, loss
        self.embed = nn.Identity() if not latent else Folded(d, latent) if by_distance else nn.Linear(d, latent)

    def encode(self, x: Tensor) -> Tensor:
        """Features (n, d) of images (n, h, w, c), or of features themselves."""
        return x if self.encoder is None else features_of(self.encoder, x, self.mirrored and not self.training)

    def answer(self, features: Tensor, value: Tensor) -> Tensor:
        """Scores of the queries; features (B, N + M, d)."""
        embedded = self.embed(features)
        n = value.shape[1]
        return self.head(embedded[:, :n], value.argmax(-1), embedded[:, n:])

    def scores(self, shots: Shots) -> Tensor:
        """Of the queries (B, M, way)."""
        features = self.encode(shots.x.flatten(0, 1)).unflatten(0, shots.x.shape[:2])
        return self.answer(features, shots.value)

    def forward(self, shots: Shots) -> Tensor:
        """The loss of a batch of tasks."""
        return score_loss(self.scores(shots), shots.labels, self.loss_name)


class Mixed(FewShot):
    """Trained on `tasks` tasks that are drawn from the images of a batch: of all its classes, with other examples.

    An image is encoded once, which is nearly all of the work, and takes part in many tasks.
    """

    def __init__(self, tasks: int, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.tasks = tasks

    def forward(self, shots: Shots) -> Tensor:
        features = self.encode(shots.x.flatten(0, 1)).unflatten(0, shots.x.shape[:2])
        features, labels = mix(features, shots, self.tasks)
        return score_loss(self.answer(features, shots.value[:1].expand(self.tasks, -1, -1)), labels, self.loss_name)


def mix(features: Tensor, shots: Shots, tasks: int) -> tuple[Tensor, Tensor]:
    """Features (tasks, N + M, d) and queries' labels (tasks, M), from those of episodes (B, N + M, d)."""
    way, n = shots.classes.shape[1], shots.value.shape[1]
    by_class = [part.unflatten(1, (way, -1)) for part in (features[:, :n], features[:, n:])]
    points = torch.cat(by_class, 2).flatten(0, 1)  # (classes, images, d)
    known = shots.classes.flatten()
    # two episodes may have a class in common: it is drawn once, or a task would have it under two labels
    earlier = torch.ones(len(known), len(known), dtype=torch.bool, device=known.device).tril(-1)
    first = ~earlier.logical_and(known[:, None] == known).any(1)
    # drawn on the CPU, so that a seed means the same tasks everywhere
    chosen = torch.rand(tasks, len(known)).to(known.device).masked_fill(~first, 2.0).argsort(-1)[:, :way]
    images = torch.rand(tasks, way, points.shape[1]).to(known.device).argsort(-1)
    drawn = points[chosen.unsqueeze(-1), images]  # (tasks, way, images, d)
    shot = n // way
    mixed = torch.cat([drawn[:, :, :shot].flatten(1, 2), drawn[:, :, shot:].flatten(1, 2)], 1)
    return mixed, shots.labels[:1].expand(tasks, -1)


class Folded(nn.Linear):
    """A linear layer up to a rotation and a shift of its output: all distances are those of x W' + b.

    For an output wider than the input, x C with C C' = W'W has the same distances in fewer numbers: 8192 features of
    64 cost as much as 64. Least squares with an intercept, LDA and QDA, with alpha I or a kernel of the distance, give
    the same answers and gradients (a test holds them equal).
    """

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(inside, outside, bias=False)
        # lengths are kept at the start, whatever the latent size: one start of alpha serves all of them
        nn.init.normal_(self.weight, std=outside**-0.5)

    def forward(self, input: Tensor) -> Tensor:
        if self.out_features <= self.in_features or self.in_features > FOLDED:
            return super().forward(input)
        return input @ torch.linalg.cholesky(self.weight.mT @ self.weight)


def score_loss(scores: Tensor, labels: Tensor, name: str) -> Tensor:
    if name == "mse":
        return (scores - (2 * nnf.one_hot(labels, scores.shape[-1]) - 1)).square().mean()
    return nnf.cross_entropy(scores.flatten(0, 1), labels.flatten())


def attention(
    latent: int, way: int, decode: tuple[int, ...], heads: int, alpha: LearnableAlpha | None = None
) -> Matching:
    """e_P(MHA(E_Q, E_K, e_H(e_V(V)))); with alpha its heads are those of σIntention."""
    embed_value = mlp(way, latent, latent, latent, latent)  # e_V of three layers and a layer for e_H
    mixer = WideAttention(latent, latent, heads) if alpha is None else WideSigma(latent, latent, heads, alpha)
    return Matching(mixer=mixer, embed_value=embed_value, decode=mlp(latent, *decode, way))


def start_as_in_jax(*modules: nn.Module) -> None:
    """Weights of variance 1 / inputs, no biases: torch's start has a third of it, and e_V, mixer and e_P are so many
    layers that the scores hardly depend on the input: the loss stays log(way)."""
    for layer in (layer for module in modules for layer in module.modules() if isinstance(layer, nn.Linear)):
        nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
        nn.init.zeros_(layer.bias)


class Pretrained(FewShot):
    """The frozen-feature baseline: trained to tell all training classes apart, then LS-SVM on its features."""

    def __init__(self, encoder: Encoder | None, d: int, latent: int, classes: int, alpha: float) -> None:
        super().__init__(encoder, d, latent, LsSvm(LearnableAlpha(alpha)), "cross-entropy", by_distance=True)
        self.head.requires_grad_(False)
        self.classify = nn.Linear(latent or d, classes)

    def forward(self, shots: Shots) -> Tensor:
        scores = self.classify(self.embed(self.encode(shots.x.flatten(0, 1))))
        own = torch.cat([shots.value.argmax(-1), shots.labels], 1)  # 0 to way - 1, in the order of x
        return nnf.cross_entropy(scores, shots.classes.gather(1, own).flatten())


class ImageMaml(Maml):
    """MAML: encoder and linear layer take gradient steps on the examples of each task.

    Batch norm has the statistics of the batch always, of the examples and of the queries of one task.

    Attributes:
        mirrored: in eval mode, scores are the mean of those for a task and for its mirror images.
    """

    mirrored = False

    def __init__(self, encoder: Encoder | None, d: int, way: int, steps: int, rate: float, second_order: bool) -> None:
        layers: list[nn.Module] = [nn.Linear(d, way)]
        super().__init__(nn.Sequential(*([] if encoder is None else [encoder]), *layers), steps, rate, second_order)
        self.images = encoder is not None

    def scores(self, shots: Shots) -> Tensor:
        n, labels = shots.value.shape[1], shots.value.argmax(-1)
        if not self.images:
            return Maml.forward(self, shots.x[:, :n], labels, shots.x[:, n:])
        views = [shots.x, shots.x.flip(3)] if self.mirrored and not self.training else [shots.x]
        asked = [normalise(x) for x in views]  # (B, N + M, h, w, c) of bytes
        return torch.stack([Maml.forward(self, x[:, :n], labels, x[:, n:]) for x in asked]).mean(0)

    def forward(self, shots: Shots) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride] - a loss, here
        return score_loss(self.scores(shots), shots.labels, "cross-entropy")
