"""The arguments of a function: what of them is an array, what it is called, and which hold parameters."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jqobs.naming import Path


class Leaf(NamedTuple):
    """A leaf of an argument, or an array that the function closes over."""

    path: Path
    rank: int = 2  # How much its name says of a product: 0 a whole argument, 1 a variable, 2 an entry of a tree.


@dataclasses.dataclass(frozen=True)
class Arguments:
    """All of the arguments of a call that is no array. Hashable, if flags and strings are all there is.

    Numbers are arrays, as in `jax.jit`.

    Example:
      >>> from jqobs.arguments import Arguments
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
        return cls(structure, static), [leaf for leaf in leaves if _is_array(leaf)]

    def restore(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with these arrays in their places."""
        static, rest = dict(self.static), iter(arrays)
        places = range(self.structure.num_leaves)
        return self.structure.unflatten([static[place] if place in static else next(rest) for place in places])


def name_leaves(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], params: Any
) -> list[tuple[Leaf, bool]]:
    """What each array among the arguments of a function is called, and whether it is a parameter.

    Args:
      function: The function, of which the names of its parameters are read.
      args: Its arguments.
      kwargs: Its keyword arguments.
      params: Which arguments are parameters: their numbers, or a predicate on the paths of leaves, the name of the
        argument in front.

    Returns:
      A pair for each array, in the order of the leaves.

    Raises:
      ValueError: `params` of another kind, or out of range.

    Example:
      >>> import jax.numpy as jnp
      >>> from jqobs.arguments import name_leaves
      >>> name_leaves(lambda params, x: x, ({"up": jnp.ones(3)}, jnp.ones(2)), {}, 0)
      [(Leaf(path=('up',), rank=2), True), (Leaf(path=('x',), rank=0), False)]
    """
    is_parameter = _parameter_test(params, len(args))
    named, leaves = _argument_names(function, args), []
    for path, leaf in jax.tree_util.tree_leaves_with_path((tuple(args), dict(kwargs))):
        if _is_array(leaf):
            where: Any = path[1]
            is_positional, keys = path[0].idx == 0, _keys(path[2:])
            name = named[where.idx] if is_positional else str(where.key)
            which = where.idx if is_positional else None
            named_leaf = Leaf(keys) if keys else Leaf((name,), rank=0)
            leaves.append((named_leaf, is_parameter(which, "/".join((name, *keys)))))
    return leaves


def find_closed_over(function: Callable[..., Any]) -> dict[int, Leaf]:
    """The arrays that a function can reach without an argument, by their identity.

    Example:
      >>> import jax.numpy as jnp
      >>> from jqobs.arguments import find_closed_over
      >>> params = {"up": jnp.ones(3)}
      >>> [leaf.path for leaf in find_closed_over(lambda x: params["up"] * x).values()]
      [('up',)]
    """
    found: dict[int, Leaf] = {}
    visited: set[int] = set()

    def collect(name: str | None, value: Any, depth: int) -> None:
        if id(value) in visited or inspect.ismodule(value) or isinstance(value, type):
            return
        visited.add(id(value))
        try:
            leaves = jax.tree_util.tree_leaves_with_path(value)
        except Exception:  # Whatever it is, it is not a container of arrays.
            return
        for path, leaf in leaves:
            if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
                keys = _keys(path)
                if keys or name:
                    found.setdefault(id(leaf), Leaf(keys) if keys else Leaf((str(name),), rank=1))
            elif depth < 3 and callable(leaf):
                reach(leaf, depth + 1)

    def reach(function: Any, depth: int) -> None:
        if isinstance(function, functools.partial):
            for i, value in enumerate(function.args):
                collect(f"arg{i}", value, depth)
            for name, value in function.keywords.items():
                collect(name, value, depth)
            function = function.func
        if (owner := getattr(function, "__self__", None)) is not None:
            collect(None, owner, depth)
        function = inspect.unwrap(function)
        package = (getattr(function, "__module__", None) or "").split(".")[0]
        if not inspect.isroutine(function) or package in {"jax", "flax"}:
            return
        try:
            variables = inspect.getclosurevars(function)
        except (TypeError, ValueError):
            return
        for name, value in {**variables.nonlocals, **variables.globals}.items():
            collect(name, value, depth)

    reach(function, 0)
    return found


def _is_array(leaf: Any) -> bool:
    is_number = isinstance(leaf, int | float | complex) and not isinstance(leaf, bool)
    return is_number or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))


def _keys(path: Iterable[Any]) -> Path:
    """The keys of a path in a pytree. A last `.value` is the box of a Flax variable."""
    keys = [(key, str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))) for key in path]
    if keys and keys[-1][1] == "value" and hasattr(keys[-1][0], "name"):
        keys.pop()
    return tuple(name for _, name in keys)


def _argument_names(function: Callable[..., Any], args: Sequence[Any]) -> list[str]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [positional[i] if i < len(positional) else f"arg{i}" for i in range(len(args))]


def _parameter_test(params: Any, count: int) -> Callable[[int | None, str], bool]:
    if params is None:
        return lambda which, path: False
    if callable(params):
        return lambda which, path: bool(params(path))
    numbers: Any = [params] if isinstance(params, int) and not isinstance(params, bool) else params
    is_numbers = isinstance(numbers, tuple | list) and all(type(n) is int for n in numbers)
    if not is_numbers or not all(-count <= n < count for n in numbers):
        raise ValueError(
            f"params must be numbers of the {count} arguments, or a function of the path of a leaf; got {params!r}"
        )
    chosen = {n % count for n in numbers}
    return lambda which, path: which in chosen
