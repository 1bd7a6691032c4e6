"""Float arithmetic whose bits do not depend on how XLA compiled it.

XLA rewrites a division by a constant (or by a broadcast scalar) into a multiplication by the reciprocal, and contracts
a multiplication and an addition into one fused operation. Both are an ulp away from what NumPy, eager JAX and the
PyTorch compute, and an ulp moves a zero point. `optimization_barrier` would stop the compiler, but it is
dropped under `jax.vmap`; a value that depends on the data cannot be.
"""

import jax
import jax.numpy as jnp


def opaque(value: jax.typing.ArrayLike, behind: jax.Array) -> jax.Array:
    """Returns `value`, elementwise in the shape of `behind`, so that the compiler cannot see what it is.

    Where `behind` is NaN the result is NaN. `behind` must depend on data, and be another array than `value`: a choice
    between a value and itself is no choice.

    Example:
      >>> import jax.numpy as jnp
      >>> from jqobs.numerics.arithmetic import opaque
      >>> opaque(255.0, jnp.float32([1.0, 2.0])).tolist()
      [255.0, 255.0]
    """
    return jnp.where(behind == behind, value, behind)  # Equal to itself, unless NaN.


def divide(numerator: jax.Array, denominator: jax.typing.ArrayLike) -> jax.Array:
    """Divides as IEEE 754 does, on every path: eager, jitted, vmapped, with a constant or a scalar denominator.

    Args:
      numerator: A float32 array that depends on data.
      denominator: A float32 array or a number that broadcasts against it.

    Returns:
      The correctly rounded quotient, in the shape of `numerator`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jqobs.numerics.arithmetic import divide
      >>> divide(jnp.float32([51.0, 255.0]), 255.0).tolist() == [jnp.float32(0.2), 1.0]
      True
    """
    return numerator / opaque(denominator, behind=numerator)


def interpolate(start: jax.Array, stop: jax.Array, fraction: jax.typing.ArrayLike) -> jax.Array:
    """Moves from `start` towards `stop` by `fraction`: `start + fraction * (stop - start)`, each step rounded.

    Where float32 cannot hold the difference, both are scaled before they meet.

    Example:
      >>> import jax.numpy as jnp
      >>> from jqobs.numerics.arithmetic import interpolate
      >>> interpolate(jnp.float32(0.0), jnp.float32(-10.0), 0.25).item()
      -2.5
    """
    near = start + opaque(fraction * (stop - start), behind=start)
    return jnp.where(jnp.isfinite(stop - start), near, start * (1 - fraction) + stop * fraction)


def extremes(x: jax.Array, where: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The smallest and the largest of the values at `where`, whatever the order; infinities if there is none.

    A zero has no sign here: which of 0.0 and -0.0 counts as smaller would depend on who comes first.

    Example:
      >>> import jax.numpy as jnp
      >>> from jqobs.numerics.arithmetic import extremes
      >>> [end.item() for end in extremes(jnp.array([3.0, jnp.nan, -1.0]), jnp.array([True, False, True]))]
      [-1.0, 3.0]
    """
    ends = jnp.min(x, initial=jnp.inf, where=where), jnp.max(x, initial=-jnp.inf, where=where)
    low, high = (jnp.where(end == 0, 0.0, end) for end in ends)
    return low, high
