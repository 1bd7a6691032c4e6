"""Which codes exist: the integer types, the schemes, and the two bound together as the grid that a range is mapped
on.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import operator
from typing import Any

import jax.numpy as jnp
import numpy as np

_NAMED_RANGES = {
    "qint2": (-2, 1),
    "quint2": (0, 3),
    "qint4": (-8, 7),
    "quint4": (0, 15),
    "qint8": (-128, 127),
    "quint8": (0, 255),
    "qint16": (-(2**15), 2**15 - 1),
    "quint16": (0, 2**16 - 1),
    "qint32": (-(2**31), 2**31 - 1),
}

_SMALLEST_NORMAL = float(np.finfo(np.float32).smallest_normal)


@dataclasses.dataclass(frozen=True, repr=False)
class QDtype:
    """A quantized integer type: a name, and the range of codes that is used of it.

    The nine types are `qint8`, `quint8`, `qint4`, `quint4`, `qint2`, `quint2`, `qint16`, `quint16` and `qint32`. A
    narrower range is a copy: `dataclasses.replace(qint8, quant_min=-127)`.

    Attributes:
      name: One of the nine names.
      quant_min: The smallest code, at most 0.
      quant_max: The largest code, at least 0 and above `quant_min`.

    Raises:
      ValueError: A range that is empty, does not hold 0, or leaves the named type's own.

    Example:
      >>> import dataclasses, jqobs
      >>> narrow = dataclasses.replace(jqobs.qint8, quant_min=-127)
      >>> narrow, narrow.levels, narrow.bits
      (replace(qint8, quant_min=-127), 255, 8)
    """

    name: str
    quant_min: int
    quant_max: int

    def __post_init__(self) -> None:
        if self.name not in _NAMED_RANGES:
            raise ValueError(f"name must be one of {', '.join(_NAMED_RANGES)}; got {self.name!r}")
        for field in ("quant_min", "quant_max"):
            value = getattr(self, field)
            try:
                exact = operator.index(value)
            except TypeError:
                raise ValueError(f"{field} must be an integer; got {value!r}") from None
            object.__setattr__(self, field, exact)
        low, high = _NAMED_RANGES[self.name]
        chosen = f"got quant_min={self.quant_min}, quant_max={self.quant_max}"
        if not low <= self.quant_min <= self.quant_max <= high:
            raise ValueError(
                f"quant_min..quant_max must be a range inside {low}..{high}, that of {self.name}; {chosen}"
            )
        if self.quant_min == self.quant_max:
            raise ValueError(f"quant_min must be smaller than quant_max; {chosen}")
        if not self.quant_min <= 0 <= self.quant_max:
            raise ValueError(f"quant_min..quant_max must hold the code 0; {chosen}")

    @property
    def levels(self) -> int:
        """The number of codes, `quant_max - quant_min + 1`."""
        return self.quant_max - self.quant_min + 1

    @property
    def bits(self) -> int:
        """The width of the named type, whatever part of it is used."""
        return int(self.name.lstrip("quint"))

    @property
    def storage(self) -> np.dtype:
        """The dtype that codes are held in: 8 bits up to 8 bits (JAX cannot compute on fewer), then 16 and 32."""
        signed = _NAMED_RANGES[self.name][0] < 0
        return jnp.dtype(f"{'' if signed else 'u'}int{max(self.bits, 8)}")

    def __repr__(self) -> str:
        low, high = _NAMED_RANGES[self.name]
        changed = [f"quant_min={self.quant_min}"] * (self.quant_min != low)
        changed += [f"quant_max={self.quant_max}"] * (self.quant_max != high)
        return f"replace({self.name}, {', '.join(changed)})" if changed else self.name


qint8, quint8, qint4, quint4, qint2, quint2, qint16, quint16, qint32 = (
    QDtype(name, *_NAMED_RANGES[name])
    for name in ("qint8", "quint8", "qint4", "quint4", "qint2", "quint2", "qint16", "quint16", "qint32")
)


class QScheme(enum.Enum):
    """How a real range is laid on the codes, and whether channels have a range of their own.

    Affine: the range may lie anywhere around zero and the zero point moves. Symmetric: the range is `-a..a` and the
    zero point is the middle code.

    Example:
      >>> import jqobs
      >>> jqobs.per_channel_symmetric.is_symmetric, jqobs.per_channel_symmetric.is_per_channel
      (True, True)
    """

    PER_TENSOR_AFFINE = "per_tensor_affine"
    PER_TENSOR_SYMMETRIC = "per_tensor_symmetric"
    PER_CHANNEL_AFFINE = "per_channel_affine"
    PER_CHANNEL_SYMMETRIC = "per_channel_symmetric"

    @property
    def is_symmetric(self) -> bool:
        """Whether the range is symmetric around zero."""
        return self.value.endswith("symmetric")

    @property
    def is_per_channel(self) -> bool:
        """Whether every channel (or group of a channel) has a scale of its own."""
        return self.value.startswith("per_channel")

    def __repr__(self) -> str:
        return self.value


per_tensor_affine = QScheme.PER_TENSOR_AFFINE
per_tensor_symmetric = QScheme.PER_TENSOR_SYMMETRIC
per_channel_affine = QScheme.PER_CHANNEL_AFFINE
per_channel_symmetric = QScheme.PER_CHANNEL_SYMMETRIC


@dataclasses.dataclass(frozen=True)
class Grid:
    """The codes that a range is mapped onto: a type, a scheme, and a floor under the scale. Range rules read it.

    Attributes:
      qscheme: The scheme.
      qdtype: The type.
      eps: The smallest scale; None stands for 1e-8 up to 16 bits and for the smallest normal float32 above.

    Raises:
      ValueError: An argument of another type, or an `eps` that float32 cannot hold as a positive normal number.

    Example:
      >>> import jqobs
      >>> from jqobs.formats.qtypes import Grid
      >>> Grid(jqobs.per_tensor_affine, jqobs.quint4)
      Grid(qscheme=per_tensor_affine, qdtype=quint4, eps=1e-08)
    """

    qscheme: QScheme
    qdtype: QDtype
    eps: float = None  # pyright: ignore[reportAssignmentType]  (None only until it is resolved below)

    def __post_init__(self) -> None:
        if not isinstance(self.qscheme, QScheme):
            raise ValueError(f"qscheme must be a QScheme such as jqobs.per_tensor_affine; got {self.qscheme!r}")
        if not isinstance(self.qdtype, QDtype):
            raise ValueError(f"qdtype must be a QDtype such as jqobs.quint8; got {self.qdtype!r}")
        eps: float | None = self.eps
        if eps is None:
            eps = 1e-8 if self.qdtype.bits <= 16 else _SMALLEST_NORMAL
        object.__setattr__(self, "eps", check_positive_normal("eps", eps))

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
        """The code of 0.0 on a symmetric grid: 0 for a type with negative codes, else the middle one."""
        return 0 if self.quant_min < 0 else (self.quant_max + self.quant_min + 1) // 2


def check_positive_normal(name: str, value: Any) -> float:
    """Returns `value` as a float, if float32 holds it as a positive normal number (backends flush the others to 0).

    Example:
      >>> from jqobs.formats.qtypes import check_positive_normal
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
