"""From a real range to a scale and a zero point. The formula is here and nowhere else."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jqobs.formats.qdtype import QDtype
from jqobs.formats.qscheme import QScheme
from jqobs.formats.quant_spec import QuantSpec
from jqobs.numerics.arithmetic import divide
from jqobs.numerics.inputs import as_array


@functools.partial(jax.tree_util.register_dataclass, data_fields=["scale", "zero_point"], meta_fields=["spec"])
@dataclasses.dataclass(frozen=True)
class QParams:
    """Where the codes lie on the real line: `real = (code - zero_point) * scale`.

    A pytree: `scale` and `zero_point` are its leaves, the rest is static. It unpacks as `scale, zero_point = qparams`.

    Attributes:
      scale: float32, `()` per tensor, `[channels]` per channel, `[channels, groups]` per group.
      zero_point: int32 of the same shape; the code of 0.0.
      spec: Which codes there are, and who shares a scale; `qparams.qdtype` and its other parts are properties.

    Example:
      >>> import jqobs
      >>> qparams = jqobs.calculate_qparams(-1.0, 3.0, jqobs.QuantSpec(jqobs.quint8, jqobs.per_tensor_affine))
      >>> scale, zero_point = qparams
      >>> scale.dtype.name, int(zero_point), qparams.qdtype
      ('float32', 64, quint8)
    """

    scale: jax.Array
    zero_point: jax.Array
    spec: QuantSpec

    def __iter__(self) -> Iterator[jax.Array]:
        return iter((self.scale, self.zero_point))

    @property
    def qdtype(self) -> QDtype:
        """The type of the codes."""
        return self.spec.qdtype

    @property
    def qscheme(self) -> QScheme:
        """The scheme that the range was mapped by."""
        return self.spec.qscheme

    @property
    def ch_axis(self) -> int | None:
        """The channel axis in the data, or None."""
        return self.spec.ch_axis

    @property
    def group_size(self) -> int | None:
        """How many values of a channel share a scale, or None for all."""
        return self.spec.group_size

    def broadcast_to(self, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        """The scale and the zero point (as float32), so that they broadcast against data of that shape.

        Raises:
          ValueError: They are for other channels or groups, or carry an extra axis (a stack made by a scan or vmap).
        """
        spec = self.spec
        if self.scale.ndim > spec.rank:
            raise ValueError(
                f"scale must have rank {spec.rank} for {self.qscheme!r}, and has shape {self.scale.shape}: "
                "these are stacked QParams; map over them, jax.vmap(jqobs.fake_quantize)(x, qparams)"
            )
        expected = spec.shape_for(shape)
        if self.scale.shape != expected:
            raise ValueError(
                f"scale must have shape {expected} for data of shape {shape} (ch_axis={self.ch_axis}, "
                f"group_size={self.group_size}); it has shape {self.scale.shape}"
            )
        zero_point = self.zero_point.astype(jnp.float32)
        return spec.broadcast_to(self.scale, shape), spec.broadcast_to(zero_point, shape)


def calculate_qparams(min_val: jax.typing.ArrayLike, max_val: jax.typing.ArrayLike, spec: QuantSpec) -> QParams:
    """Maps real ranges onto codes, so that 0.0 has a code of its own.

    The range is first widened to `lo = min(min_val, 0)`, `hi = max(max_val, 0)`. Then, with `n = quant_max -
    quant_min`:

    * affine: `scale = max((hi - lo) / n, eps)`, `zero_point = clip(quant_min - round(lo / scale), quant_min,
      quant_max)`;
    * symmetric: `scale = max(max(-lo, hi) / (n / 2), eps)`, and the zero point is 0 for a type with negative codes,
      else the middle code `(quant_max + quant_min + 1) // 2`.

    Rounding is half to even, arithmetic is float32, and every path (eager, jit, vmap) gives the same bits. A range
    whose width float32 cannot hold is divided before it is subtracted.

    Args:
      min_val: Lower ends, `()` or one per channel or group.
      max_val: Upper ends, of the same shape.
      spec: Which codes there are, and who shares a scale.

    Returns:
      `QParams` whose leaves have the shape of `min_val`.

    Raises:
      ValueError: Shapes that differ, or ends that are not finite or the wrong way round (checked eagerly only).

    Example:
      >>> import jqobs
      >>> scale, zero_point = jqobs.calculate_qparams(1.0, 3.0, jqobs.QuantSpec(jqobs.quint8, jqobs.per_tensor_affine))
      >>> round(255 * scale.item(), 4), int(zero_point)  # widened to 0..3
      (3.0, 0)

    References:
      Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference"
      (2018), section 2.1; the forms are those of `torch.ao.quantization.observer.UniformQuantizationObserverBase`.
    """
    if not isinstance(spec, QuantSpec):
        raise ValueError(f"spec must be a jqobs.QuantSpec, such as QuantSpec(qdtype, qscheme); got {spec!r}")
    given = {"min_val": min_val, "max_val": max_val}
    ends = [jnp.asarray(as_array(end, name), jnp.float32) for name, end in given.items()]
    if ends[0].shape != ends[1].shape:
        raise ValueError(f"min_val and max_val must have one shape; got {ends[0].shape} and {ends[1].shape}")
    if not any(isinstance(end, Tracer) for end in ends):
        _check_ends(*map(np.asarray, ends))
    scale, zero_point = map_range(*ends, spec)
    return QParams(scale, zero_point, spec)


def _check_ends(min_val: np.ndarray, max_val: np.ndarray) -> None:
    good = np.isfinite(min_val) & np.isfinite(max_val) & (min_val <= max_val)
    if not good.all():
        first: Any = tuple(np.argwhere(~good)[0])
        raise ValueError(
            "min_val must be at most max_val, both finite; got "
            f"min_val={min_val[first]}, max_val={max_val[first]}" + (f" at {[int(i) for i in first]}" if first else "")
        )


@functools.partial(jax.jit, static_argnames="spec")
def map_range(min_val: jax.Array, max_val: jax.Array, spec: QuantSpec) -> tuple[jax.Array, jax.Array]:
    """The formula of `calculate_qparams`, elementwise: float32 scale and int32 zero point, nothing checked."""
    lo, hi = jnp.minimum(min_val, 0.0), jnp.maximum(max_val, 0.0)
    n = float(spec.levels - 1)
    if spec.is_symmetric:
        scale = divide(jnp.maximum(-lo, hi), n / 2)
    else:
        width = hi - lo
        scale = jnp.where(jnp.isfinite(width), divide(width, n), divide(hi, n) - divide(lo, n))
    scale = jnp.clip(scale, spec.eps, jnp.finfo(jnp.float32).max)
    if not spec.is_symmetric:
        code = spec.quant_min - jnp.round(lo / scale)
        return scale, jnp.clip(code, spec.quant_min, spec.quant_max).astype(jnp.int32)
    return scale, jnp.full(scale.shape, spec.middle, jnp.int32)
