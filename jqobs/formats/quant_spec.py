"""One description of what codes there are and who shares a scale."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqobs.formats.qdtype import QDtype, quint8
from jqobs.formats.qscheme import QScheme, per_tensor_affine, per_tensor_symmetric

_SMALLEST_NORMAL = float(np.finfo(np.float32).smallest_normal)


@dataclasses.dataclass(frozen=True, repr=False)
class QuantSpec:
    """The codes that a range is mapped onto, and the part of an array that one scale is for.

    Checked once, when it is built; an Observer has one, `QParams` has one, and `calculate_qparams` and the range rules
    take one. Groups are cut from a channel: the channel axis is moved to the front, the others are flattened row-major,
    and that row is cut into parts of `group_size` values.

    Attributes:
      qdtype: The type of the codes.
      qscheme: How a range is laid on them, and whether channels have a range of their own.
      ch_axis: The axis of the channels, negative from the end. None leaves it unbound: it can be described and printed,
        and whoever knows the operation binds it later.
      group_size: How many values of a channel share a scale; None for all of them.
      eps: The smallest scale; None stands for 1e-8 up to 16 bits and for the smallest normal float32 above.

    Raises:
      ValueError: An argument of another type; `ch_axis` or `group_size` with a per-tensor scheme, or no integer; an
        `eps` that float32 cannot hold as a positive normal number.

    Example:
      >>> import jqobs
      >>> spec = jqobs.QuantSpec(jqobs.qint4, jqobs.per_channel_symmetric, ch_axis=0, group_size=4)
      >>> spec, spec.levels, spec.shape_for((2, 12))
      (QuantSpec(qint4, per_channel_symmetric, ch_axis=0, group_size=4), 16, (2, 3))
    """

    qdtype: QDtype = quint8
    qscheme: QScheme = per_tensor_affine
    ch_axis: int | None = None
    group_size: int | None = None
    eps: float = None  # pyright: ignore[reportAssignmentType]  (None only until it is resolved below)

    def __post_init__(self) -> None:
        if not isinstance(self.qscheme, QScheme):
            raise ValueError(f"qscheme must be a QScheme such as jqobs.per_tensor_affine; got {self.qscheme!r}")
        if not isinstance(self.qdtype, QDtype):
            raise ValueError(f"qdtype must be a QDtype such as jqobs.quint8; got {self.qdtype!r}")
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
        eps: float | None = self.eps
        object.__setattr__(self, "eps", self._default_eps if eps is None else check_positive_normal("eps", eps))

    @property
    def _default_eps(self) -> float:
        return 1e-8 if self.qdtype.bits <= 16 else _SMALLEST_NORMAL

    def replace(self, **changes: Any) -> QuantSpec:
        """The same with some fields changed; an `eps` that was the type's own becomes that of the new type."""
        given = {} if self.eps == self._default_eps else {"eps": self.eps}
        kept = {name: getattr(self, name) for name in ("qdtype", "qscheme", "ch_axis", "group_size")}
        return QuantSpec(**{**kept, **given, **changes})

    @property
    def quant_min(self) -> int:
        """The smallest code."""
        return self.qdtype.quant_min

    @property
    def quant_max(self) -> int:
        """The largest code."""
        return self.qdtype.quant_max

    @property
    def levels(self) -> int:
        """The number of codes."""
        return self.qdtype.levels

    @property
    def is_symmetric(self) -> bool:
        """Whether ranges are symmetric around zero."""
        return self.qscheme.is_symmetric

    @property
    def middle(self) -> int:
        """The code of 0.0 of a symmetric scheme: 0 for a type with negative codes, else the middle one."""
        return 0 if self.quant_min < 0 else (self.quant_max + self.quant_min + 1) // 2

    @property
    def rank(self) -> int:
        """The rank of a scale: 0 per tensor, 1 per channel, 2 per group."""
        return self.qscheme.is_per_channel + (self.group_size is not None)

    @property
    def per_tensor(self) -> QuantSpec:
        """The same codes, with one scale for all of an array."""
        qscheme = per_tensor_symmetric if self.is_symmetric else per_tensor_affine
        return self.replace(qscheme=qscheme, ch_axis=None, group_size=None)

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

    def __repr__(self) -> str:
        named: dict[str, Any] = {"ch_axis": self.ch_axis, "group_size": self.group_size}
        named["eps"] = None if self.eps == self._default_eps else self.eps
        shown = [repr(self.qdtype), repr(self.qscheme)]
        shown += [f"{name}={value!r}" for name, value in named.items() if value is not None]
        return f"QuantSpec({', '.join(shown)})"


def check_positive_normal(name: str, value: Any) -> float:
    """Returns `value` as a float, if float32 holds it as a positive normal number (backends flush the others to 0).

    Example:
      >>> from jqobs.formats.quant_spec import check_positive_normal
      >>> check_positive_normal("eps", 0.0)
      Traceback (most recent call last):
      ValueError: eps must be a number from 1.1754943508222875e-38 to 3.4028234663852886e+38; got 0.0
    """
    largest = float(np.finfo(np.float32).max)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not _SMALLEST_NORMAL <= number <= largest:
        raise ValueError(f"{name} must be a number from {_SMALLEST_NORMAL!r} to {largest!r}; got {value!r}")
    return number
