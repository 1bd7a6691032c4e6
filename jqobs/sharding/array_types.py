"""What depends on how arrays are spread over devices: asked of their types, at trace time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def is_on_one_device(x: jax.Array) -> bool:
    """Whether no mesh is involved, known from the type."""
    return jax.typeof(x).sharding.mesh.empty


def where(wanted: jax.Array, compute: Callable[[], Any], otherwise: Any, *, like: jax.Array) -> Any:
    """What `compute` returns if `wanted`; spared where it is not, unless `like` is spread over devices.

    There a sum behind a condition could not share a collective with others, and the branches would have to vary alike.

    Example:
      >>> import jax.numpy as jnp
      >>> from jqobs.sharding.array_types import where
      >>> where(jnp.array(False), lambda: jnp.float32(1), jnp.float32(2), like=jnp.zeros(3)).item()
      2.0
    """
    if is_on_one_device(like):
        return jax.lax.cond(wanted, compute, lambda: otherwise)
    return jax.tree.map(lambda new, old: jnp.where(wanted, new, old), compute(), otherwise)


def pvary_like(tree: Any, like: Any) -> Any:
    """The same values, of types that vary along all mapped axes that `like` varies along.

    A loop or a branch inside a checking shard_map has to return what it was given, type included.
    """
    axes = {axis for leaf in jax.tree.leaves(like) for axis in _varying(leaf)}

    def cast(leaf: Any) -> Any:
        missing = tuple(sorted(axes - _varying(leaf), key=str))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, tree)


def reshard_like(values: jax.Array, x: jax.Array) -> jax.Array:
    """Values of the shape of `x`, spread over explicit mesh axes as it is."""
    mesh = jax.typeof(x).sharding.mesh
    if values.shape != x.shape or AxisType.Explicit not in mesh.axis_types:
        return values
    return jax.sharding.reshard(values, jax.typeof(x).sharding)


def _varying(leaf: Any) -> frozenset[Hashable]:
    return jax.typeof(leaf).manual_axis_type.varying


def across_explicit_axes(function: Callable[..., Any], state: Any, x: Any, mask: Any) -> Any:
    """Calls a function of `(state, x, mask)`, leaving to the compiler how to spread it over explicit mesh axes.

    On arrays with such axes, which `jax.make_mesh` makes by default, a scatter or a reshape has to be told where its
    result goes. A state goes everywhere.
    """
    mesh = jax.typeof(x).sharding.mesh
    axes = tuple(n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit)
    if not axes:
        return function(state, x, mask)
    everywhere = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), state)
    spread: Callable[..., Any] = jax.sharding.auto_axes(function, axes=axes, out_sharding=everywhere)
    return spread(state, x, mask)


def reduce_across(combine: Callable[[Any, Any], Any], part: Any, axis_name: Hashable) -> Any:
    """Combines the parts that the devices of a mapped axis hold; each gets the whole.

    Parts are gathered and folded in a tree, so that any exact `combine` is exact here, without a collective of its own.
    """
    for name in axis_name if isinstance(axis_name, tuple) else (axis_name,):
        # Inside a shard_map that checks, types tell along which axes a value varies, and the result has to say that it
        # does not. What does not vary to begin with is one batch that all devices hold, and not one for each.
        checked = name in _varying(jax.lax.axis_index(name))
        if not checked or any(name in _varying(leaf) for leaf in jax.tree.leaves(part)):
            to = "invarying" if checked else "varying"
            gather = functools.partial(jax.lax.all_gather, axis_name=name, to=to)
            part = pvary_like(part, jax.lax.axis_index(name))  # A constant among the leaves varies along nothing.
            part = reduce_leading(combine, jax.tree.map(gather, part))
    return part


def reduce_leading(combine: Callable[[Any, Any], Any], stacked: Any) -> Any:
    """Combines the slices along the leading axis of every leaf, pairwise, in a tree.

    Example:
      >>> import jax.numpy as jnp
      >>> from jqobs.sharding.array_types import reduce_leading
      >>> reduce_leading(jnp.add, jnp.arange(5)).item()
      10
    """
    if not jax.tree.leaves(stacked):
        return stacked  # The state of an observer that remembers nothing.
    parts = [jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(jax.tree.leaves(stacked)[0].shape[0])]
    while len(parts) > 1:
        pairs = [combine(*parts[i : i + 2]) for i in range(0, len(parts) - 1, 2)]
        parts = pairs + parts[len(parts) & ~1 :]
    return parts[0]
