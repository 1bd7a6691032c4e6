"""Between real values and codes: quantize, dequantize, and the two in one with a straight-through gradient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jqobs.numerics.arithmetic import divide, opaque
from jqobs.numerics.inputs import as_array, described
from jqobs.quantization.qparams import QParams
from jqobs.sharding.array_types import reshard_like


def quantize(x: jax.typing.ArrayLike, qparams: QParams) -> jax.Array:
    """Maps real values to codes: `clip(round(x / scale) + zero_point, quant_min, quant_max)`.

    Args:
      x: Real values of any shape and real dtype; computed in float32. NaN becomes the zero point, infinities the ends.
      qparams: The grid; it aligns itself with the channels of `x`.

    Returns:
      Codes of the shape of `x` and the dtype `qparams.qdtype.storage`.

    Raises:
      ValueError: `qparams` of other channels or groups, or stacked.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> qparams = jqobs.calculate_qparams(-1.0, 3.0, jqobs.QuantSpec(jqobs.quint8, jqobs.per_tensor_affine))
      >>> jqobs.quantize(jnp.array([-9.0, 0.0, 3.0]), qparams)
      Array([  0,  64, 255], dtype=uint8)
    """
    return _quantize(as_array(x), qparams)


@jax.jit
def _quantize(x: jax.Array, qparams: QParams) -> jax.Array:
    code, zero_point = _unclipped_code(x, qparams)
    code = jnp.clip(code, qparams.qdtype.quant_min, qparams.qdtype.quant_max)
    return jnp.where(jnp.isnan(code), zero_point, code).astype(qparams.qdtype.storage)


def dequantize(codes: jax.typing.ArrayLike, qparams: QParams) -> jax.Array:
    """Maps codes back to real values: `(codes - zero_point) * scale`.

    Args:
      codes: Integer codes.
      qparams: The grid they were made on.

    Returns:
      float32 of the shape of `codes`.

    Raises:
      ValueError: `qparams` of other channels or groups, or stacked.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> qparams = jqobs.calculate_qparams(0.0, 63.75, jqobs.QuantSpec(jqobs.quint8, jqobs.per_tensor_affine))
      >>> jqobs.dequantize(jnp.array([0, 6], jnp.uint8), qparams)
      Array([0. , 1.5], dtype=float32)
    """
    return _dequantize(as_array(codes, "codes"), qparams)


@jax.jit
def _dequantize(codes: jax.Array, qparams: QParams) -> jax.Array:
    scale, zero_point = broadcast(qparams, codes)
    return _real(codes.astype(jnp.float32), scale, zero_point)


def fake_quantize(x: jax.typing.ArrayLike, qparams: QParams) -> jax.Array:
    """Rounds real values to the nearest value of the grid, as `dequantize(quantize(x))`, differentiably.

    The gradient is straight-through: 1 where the code of a value is inside the grid, 0 where it saturates, none towards
    the scale or the zero point.

    Args:
      x: Floating values of any shape; computed in float32. NaN stays NaN.
      qparams: The grid; it aligns itself with the channels of `x`.

    Returns:
      Values of the shape and dtype of `x`.

    Raises:
      ValueError: `x` is not floating, or `qparams` is of other channels or groups, or stacked.

    Example:
      >>> import jax, jax.numpy as jnp, jqobs
      >>> qparams = jqobs.calculate_qparams(0.0, 0.75, jqobs.QuantSpec(jqobs.quint2, jqobs.per_tensor_affine))
      >>> x = jnp.array([-0.5, 0.2, 0.7])
      >>> jqobs.fake_quantize(x, qparams).tolist()
      [0.0, 0.25, 0.75]
      >>> jax.grad(lambda x: jqobs.fake_quantize(x, qparams).sum())(x).tolist()
      [0.0, 1.0, 1.0]

    References:
      Bengio et al., "Estimating or Propagating Gradients Through Stochastic Neurons" (2013).
    """
    return _fake_quantize(as_floating(x), qparams)


def as_floating(x: Any) -> Any:
    """An array of floats.

    Raises:
      ValueError: It holds something else.

    Example:
      >>> from jqobs.quantization.rounding import as_floating
      >>> as_floating([1, 2])
      Traceback (most recent call last):
      ValueError: x must be floating; got int64
    """
    dtype = described(x).dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"x must be floating; got {dtype}")
    return as_array(x)


@jax.jit
def _fake_quantize(x: jax.Array, qparams: QParams) -> jax.Array:
    return _straight_through(x, jax.lax.stop_gradient(qparams))


@jax.custom_jvp
def _straight_through(x: jax.Array, qparams: QParams) -> jax.Array:
    code, zero_point = _unclipped_code(x, qparams)
    scale, _ = broadcast(qparams, x)
    on_grid = _real(jnp.clip(code, qparams.qdtype.quant_min, qparams.qdtype.quant_max), scale, zero_point)
    # The last code may lie beyond the largest value of a half type: a cast would make an infinity of it.
    largest = float(jnp.finfo(x.dtype).max)
    return jnp.clip(on_grid, -largest, largest).astype(x.dtype)


@_straight_through.defjvp
def _straight_through_jvp(primals: tuple[jax.Array, QParams], tangents: tuple[Any, Any]) -> tuple[jax.Array, Any]:
    x, qparams = primals
    code, _ = _unclipped_code(x, qparams)
    inside = (code >= qparams.qdtype.quant_min) & (code <= qparams.qdtype.quant_max)
    return _straight_through(x, qparams), jnp.where(inside, tangents[0], jnp.zeros_like(tangents[0]))


def _real(code: jax.Array, scale: jax.Array, zero_point: jax.Array) -> jax.Array:
    largest = float(jnp.finfo(jnp.float32).max)
    real = jnp.clip((code - zero_point) * scale, -largest, largest)
    return opaque(real, behind=code)  # Or it would be contracted with what the caller adds to it.


def broadcast(qparams: QParams, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The scale and the zero point (as float32), so that they broadcast against `x`, laid on devices as it is."""
    scale, zero_point = qparams.broadcast_to(x.shape)
    return reshard_like(scale, x), reshard_like(zero_point, x)


def _unclipped_code(x: jax.Array, qparams: QParams) -> tuple[jax.Array, jax.Array]:
    scale, zero_point = broadcast(qparams, x)
    return jnp.round(divide(x.astype(jnp.float32), scale)) + zero_point, zero_point
