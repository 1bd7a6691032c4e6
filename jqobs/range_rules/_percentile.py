"""The range that leaves out a given part of the values."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jqobs.formats.quant_spec import QuantSpec
from jqobs.range_rules._bins import mass_between
from jqobs.range_rules._rule import Range, RangeRule
from jqobs.recipe import factory


@factory
def percentile(p: float) -> RangeRule:
    """Keeps the values up to a percentile.

    For an affine grid from the `(100 - p)`-th to the `p`-th percentile; for a symmetric one, of the magnitudes up to
    the `p`-th. Simple and robust, but blind to the number of bits: the right `p` is another one for every width.

    Args:
      p: The percentile, 50 to 100; 100 keeps the full range.

    Returns:
      A rule for `range_rule=`.

    Raises:
      ValueError: `p` out of range.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> observer = jqobs.histogram(bins=100, range_rule=jqobs.percentile(90))
      >>> x = jnp.arange(1001.0)
      >>> scale, _ = observer.calculate_qparams(observer.update(observer.init(x), x))
      >>> round(float(scale) * 255, 1)
      900.9
    """
    if not isinstance(p, int | float) or not 50 <= p <= 100:
        raise ValueError(f"p must be from 50 to 100; got {p!r}")

    def choose(edges: jax.Array, counts: jax.Array, min_val: jax.Array, max_val: jax.Array, spec: QuantSpec) -> Range:
        if p == 100:
            return min_val, max_val
        wanted = jnp.sum(counts) * (p / 100)
        largest = jnp.maximum(jnp.abs(min_val), jnp.abs(max_val))
        if spec.is_symmetric:
            end = bisect(lambda m: mass_between(edges, counts, -m, m) >= wanted, jnp.float32(0), largest)
            return -end, end
        # From the far end inwards on each side; the lower end is the upper one of the mirrored values.
        upper = bisect(lambda end: mass_between(edges, counts, min_val, end) >= wanted, min_val, max_val)
        lower = bisect(lambda end: mass_between(edges, counts, -end, max_val) >= wanted, -max_val, -min_val)
        return jnp.minimum(-lower, upper), upper

    return RangeRule(choose)


def bisect(enough: Callable[[jax.Array], jax.Array], low: jax.Array, high: jax.Array) -> jax.Array:
    """The smallest number in `low..high` at which a condition that stays true holds, to the last bit but few."""

    def halve(_: int, ends: Range) -> Range:
        middle = ends[0] / 2 + ends[1] / 2
        met = enough(middle)
        return jnp.where(met, ends[0], middle), jnp.where(met, middle, ends[1])

    return jax.lax.fori_loop(0, 40, halve, (low, high))[1]
