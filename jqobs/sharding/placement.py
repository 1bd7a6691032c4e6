"""Spreading the arguments of a step over the devices of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from jqobs.numerics.inputs import is_array, owned


class Spread(NamedTuple):
    """Arguments on a mesh.

    Attributes:
      arguments: The arguments, on the mesh.
      specs: For every leaf where it lies.
      is_split: Whether anything is split at all, or all of it lies on every device.
    """

    arguments: Any
    specs: tuple[Any, ...]
    is_split: bool


def shard_arguments(mesh: Mesh, arguments: Any, parameters: Any) -> Spread:
    """Splits what is no parameter on its leading axis over all devices, if all of it divides; else it copies.

    Args:
      mesh: The devices.
      arguments: The arguments.
      parameters: A tree of flags like them.

    Example:
      >>> import jax, numpy as np
      >>> from jqobs.sharding.placement import shard_arguments
      >>> shard_arguments(jax.make_mesh((1,), ("data",)), (np.ones((4, 2)),), (False,)).is_split
      True
    """
    leaves, structure = jax.tree.flatten(arguments)
    leaves = [owned(leaf) if is_array(leaf) else leaf for leaf in leaves]
    flags = jax.tree.leaves(parameters)
    is_part = [is_array(leaf) and np.ndim(leaf) > 0 and not flag for leaf, flag in zip(leaves, flags, strict=True)]
    parts = [leaf for leaf, part in zip(leaves, is_part, strict=True) if part]
    # An axis of size 1 is there to be broadcast, as that of a mask.
    divides = all(leaf.shape[0] % mesh.size == 0 or leaf.shape[0] == 1 for leaf in parts)
    splits = divides and any(leaf.shape[0] >= mesh.size for leaf in parts)

    def spec(leaf: Any, part: bool) -> Any:
        return jax.P(mesh.axis_names) if splits and part and leaf.shape[0] % mesh.size == 0 else jax.P()

    specs = tuple(spec(leaf, part) for leaf, part in zip(leaves, is_part, strict=True))
    placed = [
        jax.device_put(leaf, NamedSharding(mesh, where)) if is_array(leaf) else leaf
        for leaf, where in zip(leaves, specs, strict=True)
    ]
    return Spread(structure.unflatten(placed), specs, splits)


def on_each_device(update: Callable[..., Any], mesh: Mesh, states: Any, specs: tuple[Any, ...], arguments: Any) -> Any:
    """Updates the states along the leading axis, each on a device with its part of the arguments.

    Nothing passes between devices.

    Args:
      update: `(state, *arguments) -> state`.
      mesh: The devices.
      states: Their states, one for each along the leading axis of every leaf.
      specs: Where every leaf of the arguments lies.
      arguments: The arguments, on the mesh.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jqobs.sharding.placement import on_each_device
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> on_each_device(lambda total, x: total + x.sum(), mesh, jnp.ones(1), (jax.P("data"),), (jnp.ones(3),)).tolist()
      [4.0]
    """
    own = jax.P(mesh.axis_names)

    def on_each(states: Any, arguments: Any) -> Any:
        state = update(jax.tree.map(lambda leaf: leaf[0], states), *arguments)
        return jax.tree.map(lambda leaf: leaf[None], state)

    where = jax.tree.unflatten(jax.tree.structure(arguments), specs)
    # What leaves varies with the device, so that there is nothing to check; and a user's loop may carry a constant.
    return jax.shard_map(on_each, mesh=mesh, in_specs=(own, where), out_specs=own, check_vma=False)(states, arguments)


def replicate(mesh: Mesh, tree: Any) -> Any:
    """A copy on every device.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jqobs.sharding.placement import replicate
      >>> replicate(jax.make_mesh((1,), ("data",)), jnp.ones(3)).sharding.is_fully_replicated
      True
    """
    return jax.device_put(tree, NamedSharding(mesh, jax.P()))


def with_automatic_axes(mesh: Mesh) -> Mesh:
    """The same devices, with the compiler to decide: a function that nobody edited does not say where results go.

    Example:
      >>> import jax
      >>> from jqobs.sharding.placement import with_automatic_axes
      >>> with_automatic_axes(jax.make_mesh((1,), ("data",))).axis_types
      (Auto,)
    """
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
