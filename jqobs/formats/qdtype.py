"""Which codes exist: the integer types."""

from __future__ import annotations

import dataclasses
import operator

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
