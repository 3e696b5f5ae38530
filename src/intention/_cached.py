"""A property computed once.

functools.cached_property holds a lock before Python 3.12, where torch.compile stops; and what was computed under
no_grad must not be handed out where a gradient is wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

import torch

T = TypeVar("T")


class lazy(Generic[T]):
    """The first look calls the function, later ones find its result in the instance."""

    def __init__(self, function: Callable[[Any], T]) -> None:
        self.function, self.name, self.__doc__ = function, function.__name__, function.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> lazy[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object, owner: type) -> T | lazy[T]:
        if instance is None:
            return self
        # under this name Python finds it without coming here; it serves no_grad, too, but not the other way round
        name = self.name if torch.is_grad_enabled() else f"{self.name} without gradient"
        if name not in instance.__dict__:
            instance.__dict__[name] = self.function(instance)
        return instance.__dict__[name]
