"""Who shares a scale: all values of a tensor, a channel, or a group of a channel; and how each lies in the data."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jqobs.formats.qtypes import QScheme


@dataclasses.dataclass(frozen=True)
class Granularity:
    """The part of an array that one scale is for.

    Groups are cut from a channel: the channel axis is moved to the front, the others are flattened row-major, and that
    row is cut into chunks of `group_size` values.

    Attributes:
      qscheme: Whether there are channels at all.
      ch_axis: The axis of the channels, negative from the end. None leaves it unbound: it can be described and printed,
        and whoever knows the operation binds it later.
      group_size: How many values of a channel share a scale; None for all of them.

    Raises:
      ValueError: `ch_axis` or `group_size` with a per-tensor scheme, not an integer, or no group at all.

    Example:
      >>> import jqobs
      >>> from jqobs.formats.granularity import Granularity
      >>> Granularity(jqobs.per_channel_symmetric, ch_axis=0, group_size=4).shape_for((2, 12))
      (2, 3)
    """

    qscheme: QScheme
    ch_axis: int | None = None
    group_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("ch_axis", "group_size"):
            value: Any = getattr(self, name)
            if value is None:
                continue
            if not self.qscheme.is_per_channel:
                raise ValueError(f"{name} needs a per-channel qscheme; got {name}={value!r} with {self.qscheme!r}")
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise ValueError(f"{name} must be an integer; got {value!r}")
            object.__setattr__(self, name, operator.index(value))
        if self.group_size is not None and self.group_size < 1:
            raise ValueError(f"group_size must be at least 1; got {self.group_size}")

    @property
    def rank(self) -> int:
        """The rank of a scale: 0 per tensor, 1 per channel, 2 per group."""
        return self.qscheme.is_per_channel + (self.group_size is not None)

    def axis_for(self, rank: int) -> int:
        """The channel axis of an array of that rank, counted from the front."""
        if self.ch_axis is None:
            raise ValueError(f"ch_axis must be given before a {self.qscheme!r} scheme can meet data; it is None")
        if not -rank <= self.ch_axis < rank:
            raise ValueError(f"ch_axis={self.ch_axis} is out of range for an array of rank {rank}")
        return self.ch_axis % rank

    def shape_for(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a scale for data of that shape."""
        if not self.qscheme.is_per_channel:
            return ()
        channels = shape[self.axis_for(len(shape))]
        if self.group_size is None:
            return (channels,)
        length = math.prod(shape) // max(channels, 1)
        if length % self.group_size:
            raise ValueError(
                f"group_size={self.group_size} must divide the {length} values of a channel of data of shape {shape}"
            )
        return (channels, length // self.group_size)

    def split(self, x: jax.Array) -> jax.Array:
        """The data with the axes of its scale in front: `[*scale_shape, ...]`. Per tensor nothing moves."""
        groups = self.shape_for(x.shape)
        if not groups:
            return x
        rows = jnp.moveaxis(x, self.axis_for(x.ndim), 0)
        return rows if self.group_size is None else rows.reshape(*groups, self.group_size)

    def broadcast_to(self, values: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The values of a scale, so that they broadcast against data of that shape, rank included."""
        if not values.ndim:
            return values
        axis = self.axis_for(len(shape))
        if self.group_size is None:
            return values.reshape([-1 if i == axis else 1 for i in range(len(shape))])
        rest = shape[:axis] + shape[axis + 1 :]
        each = jnp.repeat(values, self.group_size, axis=-1).reshape(shape[axis], *rest)
        return jnp.moveaxis(each, 0, axis)

    def vmap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Maps a function of one group over the leading axes that a scale has."""
        for _ in range(self.rank):
            function = jax.vmap(function)
        return function
