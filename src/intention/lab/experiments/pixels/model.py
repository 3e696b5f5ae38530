"""The models of the sine experiment on pixels, and what an image is worth without any model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from intention.lab.experiments.pixels.task import codes
from intention.lab.models.maml import Maml
from intention.lab.tasks import Episode

__all__ = ["REFERENCES", "MamlOfMany", "OnPixels", "linear", "mean", "nearest"]


class OnPixels(nn.Module):
    """A model of places, called with numbers of pixels.

    `shared` names the embeddings e_K that keys and queries have in common: there are few places and many keys, so it
    embeds all places once and looks keys and queries up. The numbers are the same.
    """

    codes: Tensor

    def __init__(self, places: Tensor, model: nn.Module, shared: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.register_buffer("codes", places, persistent=False)
        self.embed = getattr(model, shared[0]) if shared else nn.Identity()
        for name in shared:
            setattr(model, name, nn.Identity())
        self.model = model

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        places = self.embed(self.codes)  # (pixels, d)
        look_up = nnf.embedding  # its backward is faster than that of places[key]
        return self.model(look_up(query[..., 0], places), look_up(key[..., 0], places), value)


class MamlOfMany(Maml):
    """With more points than the layers are wide it is cheaper to write the weights of each task out."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        layers = [layer for layer in self.net if isinstance(layer, nn.Linear)]
        own = [(layer.weight.expand(len(key), -1, -1), layer.bias.expand(len(key), 1, -1)) for layer in layers]
        for _ in range(self.steps):
            own = self.descend(own, key, value)
        x = query.expand(len(key), -1, -1)
        for weight, bias in own:
            x = torch.baddbmm(bias, x if weight is own[0][0] else x.relu(), weight.mT)
        return x

    def descend(self, own: list[tuple[Tensor, Tensor]], key: Tensor, value: Tensor) -> list[tuple[Tensor, Tensor]]:
        """One gradient step of every task on its mean squared error."""
        inputs, out = [], key
        for weight, bias in own:
            inputs.append(out.relu() if inputs else out)
            out = torch.baddbmm(bias, inputs[-1], weight.mT)
        slope = (out - value) * (2 / value[0].numel())
        slopes = [slope]
        for (weight, _), x in zip(own[:0:-1], inputs[:0:-1], strict=True):
            slope = (slope @ weight) * (x > 0)
            slopes.append(slope)
        return [
            (torch.baddbmm(weight, slope.mT, x, alpha=-self.rate), bias - self.rate * slope.sum(-2, keepdim=True))
            for (weight, bias), x, slope in zip(own, inputs, reversed(slopes), strict=True)
        ]


# ---- no model


def mean(episode: Episode) -> Tensor:
    return episode.value.mean(-2, keepdim=True).expand_as(episode.target)


def nearest(episode: Episode) -> Tensor:
    """The observed pixel that is nearest; the first of those that are equally near."""
    place = _places(episode)
    near = [torch.cdist(place[episode.query[0, :, 0]], place[key]).argmin(-1) for key in episode.key[..., 0]]
    return episode.value.gather(-2, torch.stack(near)[..., None])


def linear(episode: Episode) -> Tensor:
    """Linear within the triangles of Delaunay, the nearest pixel outside of them."""
    from matplotlib.tri import LinearTriInterpolator, Triangulation

    place, out = _places(episode).double().numpy(), nearest(episode)
    query = place[episode.query[0, :, 0].numpy()]
    for index, (key, value) in enumerate(zip(episode.key[..., 0].numpy(), episode.value[..., 0].numpy(), strict=True)):
        try:
            triangles = Triangulation(*place[key].T)
        except (ValueError, RuntimeError):  # less than three points, or all on a line
            continue
        inside = LinearTriInterpolator(triangles, value)(*query.T)  # masked outside
        known = torch.from_numpy(~inside.mask)
        out[index, known, 0] = torch.from_numpy(inside.data[~inside.mask]).to(out.dtype)
    return out


def _places(episode: Episode) -> Tensor:
    return codes(round(episode.target.shape[-2] ** 0.5), ())


REFERENCES: dict[str, Callable[[Episode], Tensor]] = {
    "mean of the context": mean,
    "nearest pixel": nearest,
    "linear interpolation": linear,
}
