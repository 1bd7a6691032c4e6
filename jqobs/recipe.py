"""A factory and its arguments: what every observer and every range rule carries, prints and is rebuilt by."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
Built = TypeVar("Built", bound=Any)  # A NamedTuple with the field `recipe`.


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Something to call and the keyword arguments to call it with: `recipe()` builds, `recipe(qdtype=...)` overrides.

    The one meaning of a recipe in the library: every observer carries the one that it was built by, and `with_args`
    makes one of any class.

    Attributes:
      factory: What is called.
      arguments: The arguments that were given, as pairs in the order of the factory's parameters.

    Example:
      >>> import jqobs
      >>> recipe = jqobs.min_max(ch_axis=0, qscheme=jqobs.per_channel_symmetric).recipe
      >>> recipe
      min_max(qscheme=per_channel_symmetric, ch_axis=0)
      >>> recipe.with_args(ch_axis=1).get("ch_axis"), recipe.get("group_size"), recipe() is recipe()
      (1, None, True)
    """

    factory: Callable[..., Any]
    arguments: tuple[tuple[str, Any], ...] = ()

    def with_args(self, **changes: Any) -> Recipe:
        """The same recipe with arguments added or replaced."""
        return Recipe(self.factory, tuple({**dict(self.arguments), **changes}.items()))

    def __call__(self, **overrides: Any) -> Any:
        """Builds."""
        return self.factory(**{**dict(self.arguments), **overrides})

    def get(self, name: str, default: Any = None) -> Any:
        """The value of an argument: as given, or as the factory has it; `default` if the factory does not take it."""
        parameter = inspect.signature(self.factory).parameters.get(name)
        if parameter is not None and parameter.default is not parameter.empty:
            default = parameter.default
        return dict(self.arguments).get(name, default)

    def __repr__(self) -> str:
        return f"{self.factory.__name__}({', '.join(f'{name}={value!r}' for name, value in self.arguments)})"


def with_args(**arguments: Any) -> Callable[[Callable[..., Any]], Recipe]:
    """Decorates a class (or a function) with arguments: the result is a recipe that builds it.

    Example:
      >>> import jqobs
      >>> @jqobs.with_args(averaging_constant=0.1)
      ... class Slow(jqobs.nnx.MovingAverageMinMaxObserver):
      ...     pass
      >>> Slow, Slow(averaging_constant=0.5).averaging_constant
      (Slow(averaging_constant=0.1), 0.5)
    """
    return lambda built: Recipe(built).with_args(**arguments)


def factory(build: Callable[P, Built]) -> Callable[P, Built]:
    """Decorates a function that builds an observer or a range rule: cached by meaning, and kept in it as its recipe.

    Two calls that mean the same return the same object, so that an observer can be a static argument of a jitted
    function, and a key.

    Raises:
      ValueError: When called with an argument that does not hash, such as an array.

    Example:
      >>> import jqobs
      >>> jqobs.min_max() is jqobs.min_max(eps=None, qdtype=jqobs.quint8)
      True
    """
    signature = inspect.signature(build)

    # The types are in the key because 1 == 1.0 == True, and only one of them is an axis.
    @functools.cache
    def cached(key: tuple[tuple[str, type, Any], ...]) -> Built:
        arguments = {name: value for name, _, value in key}
        defaults = signature.parameters
        given = tuple((name, value) for name, value in arguments.items() if value != defaults[name].default)
        return build(**arguments)._replace(recipe=Recipe(make, given))  # pyright: ignore[reportCallIssue]

    @functools.wraps(build)
    def make(*args: P.args, **kwargs: P.kwargs) -> Built:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            try:
                hash(value)
            except TypeError:
                raise ValueError(
                    f"{name} must be hashable, such as numbers or a tuple of them; got {value!r}"
                ) from None
        return cached(tuple((name, type(value), value) for name, value in bound.arguments.items()))

    return make
