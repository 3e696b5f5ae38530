"""Estimators for scikit-learn: `IntentionRegressor` and `IntentionClassifier`, in float64 on the CPU.

Needs the extra `intention[sklearn]`. In here `sklearn` is scikit-learn: imports of ours are absolute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from intention._covariance import Covariance
from intention.context import Context
from intention.context.fit import fit
from intention.kernels import KINDS, Function, Kernel
from intention.solve.ladder import PRIMAL

try:
    import numpy as np
    from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin
    from sklearn.utils import check_array, check_random_state
    from sklearn.utils.class_weight import compute_class_weight
    from sklearn.utils.multiclass import _check_partial_fit_first_call, check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError as error:
    raise ImportError(
        f"intention.sklearn needs scikit-learn 1.6 or later ({error}); use pip install 'scikit-learn>=1.6'"
    ) from error

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = ["IntentionClassifier", "IntentionRegressor"]

SCALED = ("gaussian", "laplacian", "polynomial")  # the kernels with a gamma


class _Intention(BaseEstimator):
    """What both estimators share: from arrays to `context_`, and the weights of a linear one."""

    alpha: float | str | list | tuple | np.ndarray
    fit_intercept: bool
    covariance: Covariance = "ridge"  # a parameter of the regressor alone
    kernel: str | Kernel | Function | None
    gamma: float | None
    features: str | Callable[[Tensor], Tensor] | None
    landmarks: int | None
    random_state: int | np.random.RandomState | None
    context_: Context

    @property
    def coef_(self) -> np.ndarray:
        """The weights of a linear model, (k, d); (d,) for a regressor fitted to one column y (n,)."""
        return self._columns(self._linear("coef_").w.mT)

    @property
    def intercept_(self) -> np.ndarray | float:
        """The constant of a linear model, (k,); a number for a regressor fitted to one column y (n,)."""
        return self._columns(self._linear("intercept_").intercept)

    def _columns(self, rows: Tensor) -> np.ndarray:
        return rows.numpy().copy()  # a copy, so that writing into it does not change the model

    def _linear(self, name: str) -> Context:
        check_is_fitted(self)
        if self.context_.kernel is not None or self.context_.features is not None:
            # AttributeError, so that hasattr(model, "coef_") tells linear models from others
            raise AttributeError(f"only a linear model has {name}; use kernel=None and features=None")
        return self.context_

    @torch.no_grad()  # a kernel may have parameters
    def _learn(self, x: np.ndarray, y: np.ndarray, weight: np.ndarray | None, merge: bool) -> None:
        """Fit `context_` to x (n, d) and y (n, k), or (merge) to these and the points of the calls before."""
        old = None if self._is_first(merge) else self.context_
        if old is None:
            alpha = self.alpha.tolist() if isinstance(self.alpha, np.ndarray) else self.alpha
            space = self._space(at_most=None if merge else len(x))
        else:  # what the first batch decided
            alpha, space = old.alpha, {"kernel": old.kernel, "features": old.features}
        options = {"intercept": self.fit_intercept, "covariance": self.covariance, **space}
        context = fit(_tensor(x), _tensor(y), alpha, None if weight is None else _tensor(weight), **options)
        # Points are kept where sums will not do: for a kernel, for fewer points than features, and where the fit was
        # so ill-conditioned that it went back to the points.
        if context.kernel is None and (merge or context.describe().route == PRIMAL):
            context = context.without_points()
        self.context_ = context if old is None else old.merge(context)
        self.alpha_ = float(self.context_.alpha)

    def _is_first(self, merge: bool) -> bool:
        return not (merge and hasattr(self, "context_"))

    def _space(self, at_most: int | None) -> dict[str, object]:
        """What `intention.fit` is to know of kernel and features."""
        space: dict[str, object] = {"kernel": self.kernel, "features": self.features, "landmarks": self.landmarks}
        if self.gamma is not None:
            if not isinstance(self.kernel, str) or self.kernel not in SCALED:
                raise ValueError(
                    f"gamma={self.gamma} is for a kernel named 'gaussian', 'laplacian' or 'polynomial', got "
                    f"kernel={self.kernel!r}; use gamma=None, or give it to the kernel as in kernels.Gaussian(gamma)"
                )
            space["kernel"] = KINDS[self.kernel](gamma=self.gamma)
        if isinstance(self.landmarks, np.integer):  # as a grid search has them
            space["landmarks"] = int(self.landmarks)
        if isinstance(self.features, str):
            seed = check_random_state(self.random_state).randint(np.iinfo(np.int32).max)
            space["generator"] = torch.Generator().manual_seed(int(seed))
            if at_most is not None and self.features == "nystroem" and isinstance(space["landmarks"], int):
                space["landmarks"] = min(space["landmarks"], at_most)
        return space

    def _points(self, X: ArrayLike) -> Tensor:
        check_is_fitted(self)
        return _tensor(_read(self, X, reset=False))


class IntentionRegressor(MultiOutputMixin, RegressorMixin, _Intention):
    """Ridge regression, kernel ridge regression, or ridge on features of a kernel; alpha by leave-one-out.

    >>> import numpy as np
    >>> from intention.sklearn import IntentionRegressor
    >>> X = np.array([[0.0], [1.0], [2.0], [3.0]])
    >>> model = IntentionRegressor(alpha="loo").fit(X, 2 * X[:, 0] + 1)
    >>> model.predict([[5.0]]).round(3), model.coef_.shape
    (array([11.]), (1,))
    >>> mean, std = IntentionRegressor(kernel="gaussian").fit(X, np.sin(X)).predict(X, return_std=True)
    >>> mean.shape, std.shape
    ((4, 1), (4, 1))

    Args:
        alpha: number >= 0 (in [0, 1] for covariance="convex"); a list, a grid of which leave-one-out chooses; or
            "loo", which brings its own grid.
        fit_intercept: add a constant, not regularised.
        covariance: "ridge", "convex", "within" or a callable, as in `intention.fit`.
        kernel: a name ("linear", "polynomial", "gaussian", "laplacian", "arccosine"), a Kernel, or a callable of
            tensors (x, y) -> (M, N).
        gamma: number > 0 for a polynomial, gaussian or laplacian kernel given by name. None: from the points of the
            first fit (the median heuristic, which counts a point once whatever its weight), or 1/d (polynomial).
        features: "nystroem" or "fourier": `landmarks` features of the kernel; or a callable of a tensor, such as
            `intention.features.nystroem(...)`, without kernel and landmarks.
        landmarks: how many. For "nystroem" in `fit` n_samples at most: that many is exact, more would be the same.
        random_state: for the choice of the features.

    Attributes: `coef_`, `intercept_` (linear models), `alpha_`, `context_` (an `intention.Context`), `n_features_in_`.
    A linear model or one with features keeps sums, not its training points, unless these are fewer than the features
    or so ill-conditioned that sums would lose digits.
    """

    def __init__(
        self,
        alpha=1.0,
        fit_intercept=True,
        covariance="ridge",
        kernel=None,
        gamma=None,
        features=None,
        landmarks=None,
        random_state=None,
    ):
        self.alpha, self.fit_intercept, self.covariance = alpha, fit_intercept, covariance
        self.kernel, self.gamma, self.features, self.landmarks = kernel, gamma, features, landmarks
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> IntentionRegressor:
        """X (n, d), y (n,) or (n, k), sample_weight (n,) >= 0."""
        return self._fit(X, y, sample_weight, merge=False)

    def partial_fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> IntentionRegressor:
        """Take more points, as if all had come at once. In constant memory, but for a kernel, which keeps its points.

        The first call decides what depends on the points: an alpha by leave-one-out, gamma, the features; it must have
        as many points as "nystroem" has landmarks.
        """
        return self._fit(X, y, sample_weight, merge=True)

    def _fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None, merge: bool) -> IntentionRegressor:
        first = self._is_first(merge)
        x, given = _read(self, X, y, multi_output=True, y_numeric=True, reset=first)
        target = check_array(given, ensure_2d=False, input_name="y")  # refuses a sparse one
        if not first and target.shape[1:] != self._outputs:
            wanted = ("n", *self._outputs)
            raise ValueError(
                f"y must have the shape {wanted} of the first call, got {target.shape}; use fit to start anew"
            )
        self._learn(x, target.reshape(len(target), -1), _weight(sample_weight, x), merge)
        self._outputs = target.shape[1:]  # () or (k,)
        return self

    @overload
    def predict(self, X: ArrayLike, return_std: Literal[False] = False) -> np.ndarray: ...
    @overload
    def predict(self, X: ArrayLike, return_std: Literal[True]) -> tuple[np.ndarray, np.ndarray]: ...
    @torch.no_grad()
    def predict(self, X: ArrayLike, return_std: bool = False) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """Predictions (n,) or (n, k), like y; with `return_std` also their standard deviations, of the same shape.

        They are those of the Gaussian process with this kernel (prior variance 1), a flat prior on the constant and
        noise of variance alpha in y, which `GaussianProcessRegressor` calls alpha too. Like its own they are without
        that noise: sqrt(std^2 + alpha) is that of an observation. They do not depend on y.
        """
        points = self._points(X)
        mean = self.context_(points).numpy()  # (n, k)
        mean = mean.reshape(len(mean), *self._outputs)
        if not return_std:
            return mean
        std = self.context_.variance(points).clamp(min=0).sqrt().numpy()
        return mean, np.repeat(std, mean.size // len(mean)).reshape(mean.shape)

    def _columns(self, rows: Tensor) -> np.ndarray:
        columns = super()._columns(rows)
        return columns if self._outputs else columns[0]


class IntentionClassifier(ClassifierMixin, _Intention):
    """The least-squares support vector machine: ridge regression of +1 for the class and -1 for the rest.

    >>> import numpy as np
    >>> from intention.sklearn import IntentionClassifier
    >>> X = np.array([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    >>> model = IntentionClassifier(kernel="gaussian").fit(X, ["same", "other", "other", "same"])
    >>> model.predict([[0.1, 0.9], [0.1, 0.1]]).tolist()
    ['other', 'same']

    With two classes there is one column, positive for `classes_[1]`; with more, one per class, and the largest wins.
    alpha is 1/gamma of Suykens & Vandewalle, "Least squares support vector machine classifiers", 1999.

    Args:
        class_weight: None; {class: factor of its sample weights}, 1 for those left out; or "balanced",
            n / (classes * points of the class), whatever `sample_weight` says.
        The others are those of `IntentionRegressor`.

    Attributes: `classes_`, and those of `IntentionRegressor`; `coef_` is (1, d) or (classes, d).
    """

    def __init__(
        self,
        alpha=1.0,
        fit_intercept=True,
        kernel=None,
        gamma=None,
        features=None,
        landmarks=None,
        class_weight=None,
        random_state=None,
    ):
        self.alpha, self.fit_intercept, self.class_weight = alpha, fit_intercept, class_weight
        self.kernel, self.gamma, self.features, self.landmarks = kernel, gamma, features, landmarks
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> IntentionClassifier:
        """X (n, d), y (n,) labels of at least two classes, sample_weight (n,) >= 0."""
        x, labels = _read(self, X, y)
        check_classification_targets(labels)
        self.classes_ = np.unique(labels)
        return self._fit(x, labels, sample_weight, merge=False)

    def partial_fit(
        self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None = None, sample_weight: ArrayLike | None = None
    ) -> IntentionClassifier:
        """Take more points, as `IntentionRegressor.partial_fit` does; the first call needs `classes`, all there are."""
        if isinstance(self.class_weight, str):
            raise ValueError(
                f"class_weight={self.class_weight!r} needs all labels at once; give partial_fit a dict, as in "
                "dict(zip(classes, sklearn.utils.class_weight.compute_class_weight('balanced', classes=classes, y=y)))"
            )
        _check_partial_fit_first_call(self, classes)
        x, labels = _read(self, X, y, reset=self._is_first(merge=True))
        check_classification_targets(labels)
        return self._fit(x, labels, sample_weight, merge=True)

    def _fit(self, x: np.ndarray, y: np.ndarray, sample_weight: ArrayLike | None, merge: bool) -> IntentionClassifier:
        if len(self.classes_) < 2:
            raise ValueError(f"a classifier needs at least 2 classes, got 1 class: {self.classes_.tolist()}")
        if unknown := sorted(set(np.unique(y).tolist()) - set(self.classes_.tolist())):
            raise ValueError(f"y has labels that are not in classes: {unknown}; name all on the first call")
        own = y[:, None] == self.classes_  # (n, classes)
        weight = _weight(sample_weight, x)
        if self.class_weight is not None:
            factor = own @ compute_class_weight(self.class_weight, classes=self.classes_, y=y)
            weight = factor if weight is None else factor * weight
        self._learn(x, 2.0 * (own[:, 1:] if len(self.classes_) == 2 else own) - 1, weight, merge)
        return self

    @torch.no_grad()
    def decision_function(self, X: ArrayLike) -> np.ndarray:
        """(n,) for two classes, (n, classes) for more."""
        points = self._points(X)
        scores = self.context_(points).numpy()
        return scores[:, 0] if len(self.classes_) == 2 else scores

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Labels (n,)."""
        scores = self.decision_function(X)
        return self.classes_[(scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(1)]


def _read(estimator: _Intention, *arrays: ArrayLike, **options: Any) -> Any:
    """X, or X and y, as arrays that scikit-learn has looked at."""
    return validate_data(estimator, *arrays, dtype=np.float64, **options)  # pyright: ignore[reportArgumentType]


def _tensor(x: np.ndarray) -> Tensor:
    """A copy: arrays may be read-only or change later, and the context may keep them."""
    return torch.from_numpy(np.array(x, dtype=np.float64, order="C"))


def _weight(sample_weight: ArrayLike | None, x: np.ndarray) -> np.ndarray | None:
    if sample_weight is None:
        return None
    return _check_sample_weight(sample_weight, x, dtype=np.float64, ensure_non_negative=True)
