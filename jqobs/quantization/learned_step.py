"""A step that is learned: rounding with a gradient towards the scale, too."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jqobs.numerics.arithmetic import divide
from jqobs.quantization.qparams import QParams
from jqobs.quantization.rounding import as_floating, broadcast, fake_quantize


def lsq_fake_quantize(x: jax.typing.ArrayLike, qparams: QParams) -> jax.Array:
    """Rounds real values to the grid as `fake_quantize` does, with a gradient towards the scale too (LSQ).

    So a scale is a parameter like any other: start it where an observer left it, and let an optimizer move it beside
    the weights. Of a value `v` in units of the scale, the derivative by the scale is `round(v) - v` inside the grid and
    the distance of the end from the zero point where it saturates, times `1 / sqrt(n * quant_max)` for the `n` values
    that share the scale, so that the step of a scale has the size of that of a weight.

    Args:
      x: Floating values of any shape.
      qparams: The grid; `qparams.scale` is what is learned (see the example), and must stay positive.

    Returns:
      Values of the shape and dtype of `x`.

    Raises:
      ValueError: `x` is not floating, or `qparams` is of other channels or groups, or stacked.

    Example:
      >>> import dataclasses, jax, jax.numpy as jnp, jqobs
      >>> x = jnp.array([-0.2, 0.1, 0.3, 0.9])
      >>> qparams = jqobs.calculate_qparams(-5.0, 5.0, jqobs.QuantSpec(jqobs.qint4, jqobs.per_tensor_symmetric))
      >>> def loss(scale):
      ...     return ((jqobs.lsq_fake_quantize(x, dataclasses.replace(qparams, scale=scale)) - x) ** 2).sum()
      >>> float(jax.grad(loss)(qparams.scale)) > 0  # a smaller scale is better
      True

    References:
      Esser et al., "Learned Step Size Quantization" (2020), equations 1 to 3 and section 2.2.
    """
    return _lsq_fake_quantize(as_floating(x), qparams)


@jax.jit
def _lsq_fake_quantize(x: jax.Array, qparams: QParams) -> jax.Array:
    scale, zero_point = broadcast(qparams, x)
    grid = qparams.qdtype
    code = jnp.round(divide(x.astype(jnp.float32), jax.lax.stop_gradient(scale))) + zero_point
    slope = jnp.where(
        (code >= grid.quant_min) & (code <= grid.quant_max),
        code - zero_point - x.astype(jnp.float32) / scale,
        jnp.clip(code, grid.quant_min, grid.quant_max) - zero_point,
    )
    shared = max(x.size / max(qparams.scale.size, 1), 1.0)
    factor = 1 / (shared * max(grid.quant_max, 1)) ** 0.5
    # No value, and the gradient of the paper: what is added is zero, its derivative by the scale is not.
    moved = jax.lax.stop_gradient(slope * factor) * (scale - jax.lax.stop_gradient(scale))
    return fake_quantize(x, qparams) + moved.astype(x.dtype)
