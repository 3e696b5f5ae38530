"""Heads: what reads a few labelled examples and answers for others. All are called head(support, labels, query).

support (..., N, d), labels (..., N) integers from 0 on, query (..., M, d) -> logits (..., M, classes). Leading
dimensions are tasks, solved together. weight (..., N), where it is given, counts a point so many times.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from intention import discriminant, kernels
from intention import functional as F
from intention.context import Context
from intention.context.fit import fit
from intention.nn import Intention, mlp

__all__ = ["LDA", "QDA", "Head", "Kernel", "LsSvm", "Matching", "Process", "Prototypes", "SigmaIntention", "one_hot"]

SMALLEST = 1e-6  # of a vote whose logarithm is taken


class Head(nn.Module):
    """What heads share: labels are checked once, here."""

    def forward(self, support: Tensor, labels: Tensor, query: Tensor, weight: Tensor | None = None) -> Tensor:
        """Logits (..., M, classes) of support (..., N, d), labels (..., N), query (..., M, d), weight (..., N)."""
        _check(support, labels, query)
        return self.logits(support, labels, query, weight)

    def logits(self, support: Tensor, labels: Tensor, query: Tensor, weight: Tensor | None) -> Tensor:
        raise NotImplementedError


class LsSvm(Head):
    """Intention as a classifier: (q - m) w + c, least squares with an intercept on +1 and -1, a column for each class.

    w = (K'K + alpha I)^-1 K'V with K the support around its mean m, V the labels as +1 and -1 around theirs, c.

    >>> support, labels, query = torch.randn(2, 15, 8), torch.arange(15) % 5, torch.randn(2, 7, 8)
    >>> LsSvm()(support, labels, query).shape
    torch.Size([2, 7, 5])
    >>> LsSvm("loo")(support, labels, query).shape  # each task finds its own alpha
    torch.Size([2, 7, 5])

    Args:
        alpha: a number, a `LearnableAlpha`, a `ContextAlpha`, or "loo": each task takes the one of 28 with the smallest
            leave-one-out error.
        sharpness: where the logits go into a softmax: what they are multiplied by at the start, learnable. None leaves
            them what they are, of the size of the labels.
    """

    def __init__(self, alpha: float | nn.Module | str = 1.0, sharpness: float | None = None) -> None:
        super().__init__()
        self._prepare(alpha, sharpness, None)

    def _prepare(self, alpha: float | nn.Module | str, sharpness: float | None, kernel: kernels.Kernel | None) -> None:
        if isinstance(alpha, str) and alpha != "loo":
            raise ValueError(f"alpha must be a number, a module like LearnableAlpha, or 'loo', got {alpha!r}")
        self.by_leave_one_out = isinstance(alpha, str)
        self.solve = Intention(None if isinstance(alpha, str) else alpha, intercept=True, kernel=kernel)
        self.sharpness = None if sharpness is None else nn.Parameter(torch.tensor(math.log(sharpness)))

    def fit(self, support: Tensor, labels: Tensor, weight: Tensor | None = None) -> Context:
        """The fit itself, which points can join and leave: a `Context` whose values are +1 and -1."""
        value = signs(labels, support.dtype)
        if not self.by_leave_one_out:
            return self.solve.fit(support, value, weight=weight)
        return fit(support, value, "loo", weight, intercept=True, kernel=self.solve.kernel)

    def logits(self, support: Tensor, labels: Tensor, query: Tensor, weight: Tensor | None) -> Tensor:
        if self.by_leave_one_out:
            scores = self.fit(support, labels, weight)(query)
        else:
            scores = self.solve(query, support, signs(labels, support.dtype), weight=weight)
        return scores if self.sharpness is None else scores * self.sharpness.exp()


class Kernel(LsSvm):
    """LS-SVM with a kernel k: k(q, K) (k(K, K) + alpha I)^-1 V, around the means as in `LsSvm`.

    >>> Kernel("gaussian")(torch.randn(2, 15, 8), torch.arange(15) % 5, torch.randn(2, 7, 8)).shape
    torch.Size([2, 7, 5])

    Args:
        kernel: a name or a `kernels.Kernel`, such as kernels.Gaussian(0.1, learnable=True).
        alpha, sharpness: as in `LsSvm`.
    """

    def __init__(
        self,
        kernel: str | kernels.Kernel = "gaussian",
        alpha: float | nn.Module | str = 0.1,
        sharpness: float | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self._prepare(alpha, sharpness, kernels.as_kernel(kernel))


class LDA(Head):
    """Linear discriminant analysis: q S^-1 m_c - m_c S^-1 m_c / 2 + log prior_c, S the covariance within classes.

    >>> LDA()(torch.randn(2, 15, 8), torch.arange(15) % 5, torch.randn(2, 7, 8)).shape
    torch.Size([2, 7, 5])

    Args:
        alpha: added to S, a number or a `LearnableAlpha`.
        shrinkage: S becomes (1 - s) S + s trace(S) / d I.
    """

    rule = staticmethod(discriminant.lda)

    def __init__(self, alpha: float | nn.Module = 0.01, shrinkage: float = 0.0) -> None:
        super().__init__()
        if not isinstance(alpha, int | float | nn.Module):
            raise TypeError(f"alpha must be a number or a LearnableAlpha here, got {alpha!r}")
        self.alpha, self.shrinkage = alpha, shrinkage

    def logits(self, support: Tensor, labels: Tensor, query: Tensor, weight: Tensor | None) -> Tensor:
        alpha = self.alpha() if isinstance(self.alpha, nn.Module) else self.alpha
        return self.rule(support, labels, alpha=alpha, shrinkage=self.shrinkage, weight=weight)(query)


class QDA(LDA):
    """Quadratic discriminant analysis: -((q - m_c) S_c^-1 (q - m_c)' + log det S_c) / 2 + log prior_c.

    >>> QDA()(torch.randn(2, 15, 8), torch.arange(15) % 5, torch.randn(2, 7, 8)).shape
    torch.Size([2, 7, 5])

    Each class has a covariance S_c of its own. Arguments as in `LDA`.
    """

    rule = staticmethod(discriminant.qda)


class SigmaIntention(Head):
    """log of the votes softmax(s q (K'K + alpha I)^-1 K') onehot(labels); s, the sharpness, is learnable.

    >>> SigmaIntention()(torch.randn(2, 15, 8), torch.arange(15) % 5, torch.randn(2, 7, 8)).shape
    torch.Size([2, 7, 5])

    Args:
        alpha: a number or a `LearnableAlpha`.
        sharpness: s at the start; a map of least squares is flat.
    """

    def __init__(self, alpha: float | nn.Module = 1.0, sharpness: float = 5.0) -> None:
        super().__init__()
        self.alpha = alpha
        self.sharpness = nn.Parameter(torch.tensor(math.log(sharpness)))

    def logits(self, support: Tensor, labels: Tensor, query: Tensor, weight: Tensor | None) -> Tensor:
        alpha = self.alpha() if isinstance(self.alpha, nn.Module) else self.alpha
        query, value = query * self.sharpness.exp(), one_hot(labels, support.dtype)
        votes = F.sigma_intention(query, support, value, alpha=alpha, weight=weight)
        assert isinstance(votes, Tensor)
        return votes.clamp(min=SMALLEST).log()


class Matching(Head):
    """Matching Networks: log of the votes softmax(s q K') onehot(labels); s, the sharpness, is learnable.

    >>> Matching()(torch.randn(2, 15, 8), torch.arange(15) % 5, torch.randn(2, 7, 8)).shape
    torch.Size([2, 7, 5])

    Args:
        sharpness: s at the start.
        mixer: attention of your own, (query, support, value) -> (..., M, k), in place of that one.
        embed_value: what the mixer sees of one-hot labels; None is themselves.
        decode: what makes logits of the mixer's answer; None is the logarithm.
    """

    def __init__(
        self,
        sharpness: float = 10.0,
        mixer: nn.Module | None = None,
        embed_value: nn.Module | None = None,
        decode: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.embed_value, self.mixer, self.decode = embed_value, mixer, decode
        self.sharpness = nn.Parameter(torch.tensor(math.log(sharpness))) if mixer is None else None

    def logits(self, support: Tensor, labels: Tensor, query: Tensor, weight: Tensor | None) -> Tensor:
        value = one_hot(labels, support.dtype)
        value = value if self.embed_value is None else self.embed_value(value)
        if self.mixer is None:
            assert self.sharpness is not None
            mask = None if weight is None else weight.to(support.dtype).log().unsqueeze(-2)  # w exp(s) = exp(s + log w)
            out = F.attention(query * self.sharpness.exp(), support, value, mask, scale=1.0)
        elif weight is None:
            out = self.mixer(query, support, value)
        else:
            raise ValueError("a mixer of your own knows no weights; leave weight out, or the mixer")
        return out.clamp(min=SMALLEST).log() if self.decode is None else self.decode(out)


class Process(Head):
    """Neural Process: a network that reads the means of all classes and the query. It has to be trained.

    >>> Process(8, way=5, hidden=(64,))(torch.randn(2, 15, 8), torch.arange(15) % 5, torch.randn(2, 7, 8)).shape
    torch.Size([2, 7, 5])

    Args:
        d: features.
        way: classes of every task.
        hidden: sizes of the layers between.
    """

    def __init__(self, d: int, way: int, hidden: tuple[int, ...] = (256,)) -> None:
        super().__init__()
        self.way = way
        sizes = (*hidden, way)
        # the first layer in two parts: that of the means is the same for all queries of a task
        self.from_context = nn.Linear(way * d, sizes[0])
        self.from_query = nn.Linear(d, sizes[0], bias=False)
        self.decode = mlp(*sizes)

    def logits(self, support: Tensor, labels: Tensor, query: Tensor, weight: Tensor | None) -> Tensor:
        means = class_means(support, labels, weight)
        if means.shape[-2] != self.way:
            raise ValueError(f"this Process was made for {self.way} classes, got {means.shape[-2]}; make one for these")
        read = self.from_context(means.flatten(-2)).unsqueeze(-2)
        return self.decode((read + self.from_query(query)).relu())


class Prototypes(Head):
    """Nearest mean: `-|q - m_c|^2 / sqrt(d)`, without `|q|^2`, which is the same for all classes.

    >>> Prototypes()(torch.randn(2, 15, 8), torch.arange(15) % 5, torch.randn(2, 7, 8)).shape
    torch.Size([2, 7, 5])

    The root is as in attention: without it the first steps of SGD are taken on saturated logits.
    """

    def logits(self, support: Tensor, labels: Tensor, query: Tensor, weight: Tensor | None) -> Tensor:
        means = class_means(support, labels, weight)
        scores = (2 * query @ means.mT - means.square().sum(-1).unsqueeze(-2)) / query.shape[-1] ** 0.5
        return scores.masked_fill(~_present(labels, weight).unsqueeze(-2), -torch.inf)


def one_hot(labels: Tensor, dtype: torch.dtype) -> Tensor:
    """(..., N, classes), as many as the largest label says."""
    return nnf.one_hot(labels.long()).to(dtype)


def signs(labels: Tensor, dtype: torch.dtype) -> Tensor:
    """+1 for the class of a point, -1 for the others (..., N, classes)."""
    return 2 * one_hot(labels, dtype) - 1


def class_means(support: Tensor, labels: Tensor, weight: Tensor | None) -> Tensor:
    """(..., classes, d); 0 for a class that no point has."""
    member = one_hot(labels, support.dtype)
    member = member if weight is None else member * weight.to(support.dtype).unsqueeze(-1)
    total = member.sum(-2).unsqueeze(-1)
    return member.mT @ support / torch.where(total > 0, total, 1.0)


def _present(labels: Tensor, weight: Tensor | None) -> Tensor:
    """(..., classes): whether a point has it."""
    member = nnf.one_hot(labels.long()).bool()
    return (member if weight is None else member & (weight > 0).unsqueeze(-1)).any(-2)


def _check(support: Tensor, labels: Tensor, query: Tensor) -> None:
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(
            f"labels must be integers (..., N), got {labels.dtype} {tuple(labels.shape)}; use labels.long()"
        )
    if support.dim() < 2 or query.dim() < 2 or support.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"wanted support (..., N, d) and query (..., M, d), got {tuple(support.shape)} and {tuple(query.shape)}"
        )
    if labels.shape[-1:] != support.shape[-2:-1]:
        raise ValueError(
            f"wanted a label for each of {support.shape[-2]} points of support, got labels {tuple(labels.shape)}"
        )
    if labels.numel() == 0 or int(labels.min()) < 0:
        raise ValueError("labels must be there, and be integers from 0 on: 0 for the first class of a task, 1, ...")
