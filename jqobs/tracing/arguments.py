"""The arguments of a function: what of them is an array, what it is called, and which hold parameters."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jqobs.numerics.inputs import described, is_array
from jqobs.tracing.naming import Path, shared_path

WeightArgnums = int | Sequence[int] | Callable[[str], bool] | None
"""Which arguments of a function hold weights: their numbers, or a predicate on the paths of their leaves."""


class Leaf(NamedTuple):
    """A leaf of an argument, or an array that the function closes over."""

    path: Path
    rank: int = 2  # How much its name says of a product: 0 a whole argument, 1 a variable, 2 an entry of a tree.
    argument: int = -1  # Which argument it is part of; -1 of none.

    def beside(self, other: Leaf) -> Leaf | None:
        """What is made of both: the part of the tree that both lie in."""
        if self == other:
            return self
        shared = shared_path(self.path, other.path)
        return Leaf(shared, 2, self.argument) if shared and self.argument == other.argument else None


class ClosedOver(NamedTuple):
    """What a function can reach without an argument."""

    arrays: dict[int, Leaf]  # By their identity.
    models: frozenset[str]  # The names of the classes of models: what has the methods `init` and `apply`.


@dataclasses.dataclass(frozen=True)
class Arguments:
    """All of the arguments of a call that is no array. Hashable, if flags and strings are all there is.

    Numbers are arrays, as in `jax.jit`.

    Example:
      >>> from jqobs.tracing.arguments import Arguments
      >>> form, arrays = Arguments.split((1.0, "mlp"), {"train": False})
      >>> arrays, form.restore([2.0])
      ([1.0], ((2.0, 'mlp'), {'train': False}))
    """

    structure: Any
    static: tuple[tuple[int, Any], ...]  # What is no array, with its place among the leaves.

    @classmethod
    def split(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Arguments, list[Any]]:
        """Arguments as their form and their arrays."""
        leaves, structure = jax.tree.flatten((args, dict(kwargs)))
        static = tuple((place, leaf) for place, leaf in enumerate(leaves) if not _is_array(leaf))
        return cls(structure, static), [
            described(leaf) if is_array(leaf) else leaf for leaf in leaves if _is_array(leaf)
        ]

    def restore(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with these arrays in their places."""
        static, rest = dict(self.static), iter(arrays)
        places = range(self.structure.num_leaves)
        return self.structure.unflatten([static[place] if place in static else next(rest) for place in places])


def as_arguments(batch: Any) -> tuple[Any, ...]:
    """The arguments that a batch stands for: a tuple is several, anything else, a NamedTuple included, is one.

    Example:
      >>> from jqobs.tracing.arguments import as_arguments
      >>> as_arguments((1, 2)), as_arguments([1, 2])
      ((1, 2), ([1, 2],))
    """
    return batch if isinstance(batch, tuple) and not hasattr(batch, "_fields") else (batch,)


def name_leaves(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], weight_argnums: Any
) -> list[tuple[Leaf, bool]]:
    """What each array among the arguments of a function is called, and whether it is a parameter.

    Args:
      function: The function, of which the names of its parameters are read.
      args: Its arguments.
      kwargs: Its keyword arguments.
      weight_argnums: Which arguments are parameters: their numbers, or a predicate on the paths of leaves, the name of
        the argument in front.

    Returns:
      A pair for each array, in the order of the leaves.

    Raises:
      ValueError: `weight_argnums` of another kind, or out of range.

    Example:
      >>> import jax.numpy as jnp
      >>> from jqobs.tracing.arguments import name_leaves
      >>> name_leaves(lambda params, x: x, ({"up": jnp.ones(3)}, jnp.ones(2)), {}, 0)
      [(Leaf(path=('up',), rank=2, argument=0), True), (Leaf(path=('x',), rank=0, argument=1), False)]
    """
    names = _argument_names(function, len(args))
    is_parameter = _parameter_test(weight_argnums, len(args) if not kwargs else max(len(args), len(names)))
    leaves = []
    for path, leaf in jax.tree_util.tree_leaves_with_path((tuple(args), dict(kwargs))):
        if _is_array(leaf):
            where: Any = path[1]
            keys, is_positional = _keys(path[2:]), path[0].idx == 0
            name = names[where.idx] if is_positional else str(where.key)
            which = names.index(name) if name in names else len(names)
            named_leaf = Leaf(keys or (name,), rank=2 if keys else 0, argument=which)
            leaves.append((named_leaf, is_parameter(which, "/".join((name, *keys)))))
    return leaves


def find_closed_over(function: Callable[..., Any]) -> ClosedOver:
    """The arrays and the models that a function can reach without an argument.

    Only names depend on what is found, so that whatever cannot be looked into is passed over.

    Example:
      >>> import jax.numpy as jnp
      >>> from jqobs.tracing.arguments import find_closed_over
      >>> params = {"up": jnp.ones(3)}
      >>> [leaf.path for leaf in find_closed_over(lambda x: params["up"] * x).arrays.values()]
      [('up',)]
    """
    arrays: dict[int, Leaf] = {}
    models: set[str] = set()
    visited: set[int] = set()

    def collect(name: str | None, value: Any, depth: int) -> None:
        is_large = isinstance(value, dict | list | tuple | set) and len(value) > _LARGE
        if id(value) in visited or inspect.ismodule(value) or is_large:
            return
        visited.add(id(value))
        if isinstance(value, type):
            if hasattr(value, "init") and hasattr(value, "apply"):
                models.add(value.__name__)
            return
        for path, leaf in jax.tree_util.tree_leaves_with_path(value):
            if _is_array(leaf) and not isinstance(leaf, int | float | complex):
                keys = _keys(path)
                if keys or name:
                    arrays.setdefault(id(leaf), Leaf(keys) if keys else Leaf((str(name),), rank=1))
            elif hasattr(leaf, "init") and hasattr(leaf, "apply"):
                models.add(type(leaf).__name__)
            elif depth < 3 and callable(leaf):
                attempt(reach, leaf, depth + 1)

    def reach(function: Any, depth: int) -> None:
        if isinstance(function, functools.partial):
            for place, value in enumerate(function.args):
                attempt(collect, f"arg{place}", value, depth)
            for name, value in function.keywords.items():
                attempt(collect, name, value, depth)
            function = function.func
        if (owner := getattr(function, "__self__", None)) is not None:
            attempt(collect, None, owner, depth)
        function = inspect.unwrap(function)
        package = (getattr(function, "__module__", None) or "").split(".")[0]
        if not inspect.isroutine(function) or package in {"jax", "flax"}:
            return
        variables = inspect.getclosurevars(function)
        for name, value in {**variables.nonlocals, **variables.globals}.items():
            attempt(collect, name, value, depth)

    def attempt(look: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(Exception):
            look(*arguments)

    attempt(reach, function, 0)
    return ClosedOver(arrays, frozenset(models))


_LARGE = 10_000
"""A container with more entries than that holds no parameters of a model, and would take long to go through."""


def _is_array(leaf: Any) -> bool:
    is_number = isinstance(leaf, int | float | complex) and not isinstance(leaf, bool)
    return is_number or is_array(leaf)


def _keys(path: Iterable[Any]) -> Path:
    """The keys of a path in a pytree. A last `.value` is the box of a Flax variable."""
    keys = [(key, str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))) for key in path]
    if keys and keys[-1][1] == "value" and hasattr(keys[-1][0], "name"):
        keys.pop()
    return tuple(name for _, name in keys)


def _argument_names(function: Callable[..., Any], count: int) -> list[str]:
    """The names of the positional parameters, at least `count` of them."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return names + [f"arg{place}" for place in range(len(names), count)]


def _parameter_test(weight_argnums: Any, count: int) -> Callable[[int, str], bool]:
    if weight_argnums is None:
        return lambda which, path: False
    if callable(weight_argnums):
        return lambda which, path: bool(weight_argnums(path))
    try:
        is_one = hasattr(weight_argnums, "__index__") and not isinstance(weight_argnums, bool)
        several: Any = [weight_argnums] if is_one else weight_argnums
        numbers = [operator.index(number) for number in several]
        assert not isinstance(weight_argnums, str | bool) and all(-count <= number < count for number in numbers)  # noqa: PT018
    except (TypeError, AssertionError):
        raise ValueError(
            f"weight_argnums must be numbers of the {count} arguments, or a function of the path of a leaf; "
            f"got {weight_argnums!r}"
        ) from None
    chosen = {number % count for number in numbers}
    return lambda which, path: which in chosen
