"""A classifier of a few labelled images: fitted in closed form, extended without fitting it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike, fspath
from typing import NamedTuple

import torch
from torch import Tensor

from intention.context import Context
from intention.context.by_features import ByFeatures
from intention.context.by_points import ByPoints
from intention.fewshot.backbones import Backbone, backbone
from intention.fewshot.columns import Linear, with_columns
from intention.fewshot.evaluation import unit
from intention.fewshot.heads import LsSvm
from intention.fewshot.labels import Label, Labels, calibrated, check_examples, names_of, signs
from intention.fewshot.stored import head_of, read, write
from intention.kernels import Custom

__all__ = ["FewShotClassifier", "Suspect"]

NEAR = 1e-3  # distance, relative to its length, up to which an example is the same one
Images = Tensor | Sequence[str | PathLike[str]]


class Suspect(NamedTuple):
    """An example whose label the others contradict."""

    example: int  # among all examples, in the order they came
    label: Label
    predicted: Label  # by the fit without this example
    margin: float  # score of its own label minus the largest of the others: negative, the smallest come first


class FewShotClassifier:
    """Encoder and head: fit on a few images, predict others, add images and classes as they come.

    >>> features = torch.randn(20, 8) + 4 * torch.eye(8)[torch.arange(20) % 4]
    >>> model = FewShotClassifier().fit(features, ["cat", "dog", "fox", "owl"] * 5)
    >>> model.predict(features[:2])
    ['cat', 'dog']
    >>> model = model.add(torch.randn(3, 8) - 4 * torch.eye(8)[0], ["yak"] * 3)
    >>> model.classes, model.predict_proba(features).shape
    (('cat', 'dog', 'fox', 'owl', 'yak'), torch.Size([20, 5]))

    Args:
        encoder: None where features (n, d) are given; the name of a `backbone` ("conv4" comes with the package) or a
            `Backbone` for images; or any callable that makes features.
        head: an `LsSvm` or a `Kernel`, which are fitted in closed form. Its alpha stays what the first fit found.
        normalise: features are brought to `unit` length.
    """

    def __init__(
        self,
        encoder: str | Backbone | Callable[[Tensor], Tensor] | None = None,
        head: LsSvm | None = None,
        normalise: bool = True,
    ) -> None:
        head = LsSvm(1.0) if head is None else head
        if not isinstance(head, LsSvm):
            raise TypeError(
                f"a FewShotClassifier has a head that is fitted in closed form, LsSvm or Kernel, got "
                f"{type(head).__name__}; call that one on tensors: head(support, labels, query)"
            )
        self.encoder = backbone(encoder) if isinstance(encoder, str) else encoder
        self.head, self.normalise = head, normalise
        self.classes: tuple[Label, ...] = ()
        self._context: Context | None = None
        self._linear: Linear | None = None
        self._temperature: float | None = None

    # -- examples that come and go ------------------------------------------------------------------------------------

    def fit(self, images: Images, labels: Labels) -> FewShotClassifier:
        """Forget everything and learn these: images or features, and a label (integer or text) for each."""
        features, names = self.features(images), names_of(labels)
        check_examples(features, names)
        classes = tuple(sorted(set(names), key=lambda name: (isinstance(name, str), name)))
        if len(classes) < 2:
            raise ValueError(f"two or more classes are needed to tell apart, got {len(classes)}; add images of another")
        number = {name: index for index, name in enumerate(classes)}
        with torch.no_grad():
            context = self.head.fit(features, torch.tensor([number[name] for name in names]))
        self.classes = classes
        self._keep(context, None)
        return self

    def add(self, images: Images, labels: Labels) -> FewShotClassifier:
        """Learn more examples, also of new classes, which come last in `classes`; alpha stays."""
        before = self.context
        features, names = self.features(images), names_of(labels)
        check_examples(features, names, before.sizes[0])
        fresh = tuple(dict.fromkeys(name for name in names if name not in self.classes))
        classes = self.classes + fresh
        linear = self._linear or Linear.of(before)
        context = with_columns(before, len(fresh)).add(features, signs(names, classes, features))
        self.classes = classes
        self._keep(context, None if linear is None else linear.after(before, context))
        return self

    def remove(self, images: Images, labels: Labels) -> FewShotClassifier:
        """Forget examples that were learnt; a class that loses its last one stays, without any."""
        before = self.context
        features, names = self.features(images), names_of(labels)
        check_examples(features, names, before.sizes[0])
        unknown = [name for name in names if name not in self.classes]
        if unknown:
            raise ValueError(f"there is no class {unknown[0]!r} to remove examples of; there are {self.classes}")
        assert before.key is not None
        assert before.value is not None
        found = self._members(features, names)
        if len(found) == len(before.key):
            raise ValueError("this would leave nothing; keep an example, or call fit(images, labels) with others")
        self._keep(before.remove(before.key[found], before.value[found]), None)
        return self

    def _members(self, features: Tensor, names: list[Label]) -> list[int]:
        """Which examples these are. An encoder rounds in another way in another batch, so they are near, not equal."""
        key, labels = self.context.key, self.labels
        assert key is not None
        away = torch.cdist(features.double(), key.double(), compute_mode="donot_use_mm_for_euclid_dist")
        size = key.double().norm(dim=-1)
        found: list[int] = []
        for i, name in enumerate(names):
            other = torch.tensor([label != name for label in labels])
            other[found] = True
            nearest = int(away[i].masked_fill(other, torch.inf).argmin())
            if other[nearest] or away[i, nearest] > NEAR * size[nearest]:
                raise ValueError(
                    f"image {i} of those to remove, labelled {name!r}, was not learnt with that label (or is given "
                    "more often than it was); `labels` tells what was learnt"
                )
            found.append(nearest)
        return found

    def _keep(self, context: Context, linear: Linear | None) -> None:
        self._context, self._linear, self._temperature = context, linear, None

    # -- answers ------------------------------------------------------------------------------------------------------

    def predict(self, images: Images) -> list[Label]:
        """The label of each image."""
        return [self.classes[index] for index in self.decision(self.features(images)).argmax(-1).tolist()]

    def predict_proba(self, images: Images) -> Tensor:
        """Probabilities (n, classes), in the order of `classes`: softmax of scores over the temperature."""
        return (self.decision(self.features(images)) / self.temperature).softmax(-1)

    def decision(self, features: Tensor) -> Tensor:
        """Scores (n, classes) of features as `features` gives them: near 1 for the class, near -1 for others."""
        context = self.context
        if self._linear is None:
            return context(features)
        system = context._solved.system
        assert isinstance(system, ByFeatures)
        assert system.mean_key is not None
        assert system.mean_value is not None
        out = (features.double() - system.mean_key) @ self._linear.w + system.mean_value
        return out.to(features.dtype)

    def features(self, images: Images) -> Tensor:
        """What the head sees of images: features (n, d), of length 1."""
        if self.encoder is None:
            if not isinstance(images, Tensor) or images.dim() != 2 or not images.is_floating_point():
                raise ValueError(
                    "without an encoder a tensor of features (n, d) of floating-point numbers is wanted, got "
                    f"{_described(images)}; for images give one: FewShotClassifier('conv4')"
                )
            found = images.detach()
        elif isinstance(self.encoder, Backbone):
            found = self.encoder(images)
        else:
            with torch.no_grad():
                found = self.encoder(images)  # pyright: ignore[reportArgumentType] - what it takes, its owner knows
        if not bool(torch.isfinite(found).all()):
            raise ValueError("features have NaN or infinity; look at the images, or use another encoder")
        return unit(found) if self.normalise else found

    def influences(self, features: Tensor) -> Tensor:
        """(n, N): what each example adds to the score of the predicted class; the largest decided it.

        Of features as for `decision`, whose scores are sums over examples: q Sigma^-1 k_i v_i around the means; of a
        kernel k(q, k_i) a_i.
        """
        context = self.context
        assert context.key is not None
        assert context.value is not None
        said = self.decision(features).argmax(-1)
        mean = context.key.double().mean(0)
        value = context.value.double() - context.value.double().mean(0)
        if context.kernel is not None:
            system = context._solved.system
            assert isinstance(system, ByPoints)  # with a kernel, always
            return context.kernel(features.double(), context.key.double()) * system.coef.mT[said]
        sensitivity = (features.double() - mean) @ context.solve_sigma((context.key.double() - mean).mT)
        return sensitivity * value.mT[said]

    # -- what the examples say of each other --------------------------------------------------------------------------

    @property
    def context(self) -> Context:
        """The fit itself, with all that a `Context` can be asked."""
        if self._context is None:
            raise ValueError("this classifier has learnt nothing yet; call fit(images, labels) first")
        return self._context

    @property
    def labels(self) -> list[Label]:
        """Of all examples, in the order they came."""
        return [self.classes[index] for index in self._own().tolist()]

    def _own(self) -> Tensor:
        value = self.context.value
        assert value is not None
        return value.argmax(-1)

    def left_out(self) -> Tensor:
        """Scores (N, classes) of each example by the fit without it, in closed form."""
        value = self.context.value
        assert value is not None
        return value - self.context.leave_one_out()

    def leave_one_out(self) -> float:
        """The share of examples that the others label as they are labelled."""
        return float((self.left_out().argmax(-1) == self._own()).double().mean())

    def suspects(self, count: int | None = None) -> list[Suspect]:
        """Examples whose label the others contradict, the most certain first.

        Only those with another of their class: without one the label is unknown to the others, and that says nothing.
        """
        margin, predicted = self.margins()
        labels, margin = self.labels, margin.masked_fill(~self._in_company(), torch.inf)
        found = [
            Suspect(i, labels[i], self.classes[int(predicted[i])], float(margin[i]))
            for i in margin.argsort().tolist()
            if margin[i] < 0
        ]
        return found[:count]

    def _in_company(self) -> Tensor:
        """(N,): whether there is another example of its class."""
        own = self._own()
        return own.bincount()[own] > 1

    def margins(self) -> tuple[Tensor, Tensor]:
        """(N,): score of an example's own class minus the largest other one, left out; and (N,) that other class."""
        scores, own = self.left_out(), self._own().unsqueeze(-1)
        best, other = scores.scatter(-1, own, -torch.inf).max(-1)
        return scores.gather(-1, own).squeeze(-1) - best, other

    @property
    def temperature(self) -> float:
        """What scores are divided by before the softmax: that with the smallest cross-entropy, left out.

        Of examples with another of their class; 1 where there are none.
        """
        if self._temperature is None:
            known = self._in_company()
            some = bool(known.any())
            self._temperature = calibrated(self.left_out()[known].double(), self._own()[known]) if some else 1.0
        return self._temperature

    # -- files --------------------------------------------------------------------------------------------------------

    def save(self, path: str | PathLike[str], about: dict[str, str] | None = None) -> None:
        """All that was learnt as a safetensors file (extra `safetensors`), and the name of the backbone.

        about: more to keep beside it, such as the names of the files.
        """
        if self.context.kernel is not None and isinstance(self.context.kernel.kernel, Custom):
            raise ValueError("a kernel of your own cannot be saved: its code is not part of the file")
        told = {
            "classes": self.classes,
            "backbone": self.encoder.name if isinstance(self.encoder, Backbone) else "",
            "features": self.encoder is None,
            "normalise": self.normalise,
            "search": self.head.by_leave_one_out,
            "temperature": self.temperature,
        }
        write(path, self.context.state_dict(), told, about or {})

    @staticmethod
    def load(
        path: str | PathLike[str], encoder: str | Backbone | Callable[[Tensor], Tensor] | None = None
    ) -> FewShotClassifier:
        """What `save` wrote. encoder: needed where it was a callable of your own."""
        told, context, _ = read(path)
        if encoder is None and not told["features"]:
            if not told["backbone"]:
                raise ValueError(f"{fspath(path)} was made with an encoder of its owner's; give load(path, encoder)")
            encoder = told["backbone"]
        model = FewShotClassifier(encoder, head_of(told, context), told["normalise"])
        model.classes = tuple(told["classes"])
        model._keep(context, None)
        model._temperature = float(told["temperature"])
        return model


def _described(x: object) -> str:
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
