"""The range that keeps the distribution of the values: the smallest divergence of the quantized from the original."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jqobs.formats.quant_spec import QuantSpec
from jqobs.range_rules._bins import evened
from jqobs.range_rules._rule import Range, RangeRule
from jqobs.range_rules._search import search
from jqobs.recipe import factory

BINS = 2048
"""Equal bins that distributions are compared over, whatever bins the histogram has."""

SMALLEST = 1e-9
"""In place of a probability of zero, where the divergence would be infinite."""


@factory
def entropy() -> RangeRule:
    """Minimizes the Kullback-Leibler divergence between the clipped values and the quantized ones.

    The number of codes is the grid's. It judges the shape of a distribution and not the size of errors: good for inputs
    of a softmax, and much too fond of clipping at few bits. A grid of 2048 codes or more keeps the full range.

    Returns:
      A rule for `range_rule=`.

    Example:
      >>> import jax, jqobs
      >>> x = jax.random.normal(jax.random.key(0), (20_000,)).at[0].set(50.0)
      >>> observer = jqobs.log_histogram(range_rule=jqobs.entropy())
      >>> scale, _ = observer.calculate_qparams(observer.update(observer.init(x), x))
      >>> bool(255 * scale < 25)
      True

    References:
      Migacz, "8-bit Inference with TensorRT" (2017).
    """
    return RangeRule(choose)


def choose(edges: jax.Array, counts: jax.Array, min_val: jax.Array, max_val: jax.Array, spec: QuantSpec) -> Range:
    """See `entropy`."""
    if spec.levels >= BINS:
        return min_val, max_val
    lo, hi = jnp.minimum(min_val, 0.0), jnp.maximum(max_val, 0.0)
    unit = jnp.maximum(jnp.maximum(-lo, hi), spec.eps)
    places, shares = evened(edges / unit, counts / jnp.maximum(jnp.sum(counts), 1.0), BINS)
    middles = (places[:-1] + places[1:]) / 2
    last = spec.levels - 1

    def cost(below: jax.Array, scale: jax.Array) -> jax.Array:
        free = jnp.round(middles / scale)
        code = jnp.clip(free, -below, last - below)
        inside = free == code
        cell = (code + below).astype(jnp.int32)
        sums = (
            jnp.zeros((spec.levels, 2), jnp.float32)
            .at[cell]
            .add(jnp.where(inside, jnp.stack([shares, jnp.sign(shares)]), 0.0).T)
        )
        quantized = jnp.where(inside & (shares > 0), sums[cell, 0] / jnp.maximum(sums[cell, 1], 1.0), 0.0)
        quantized = quantized / jnp.maximum(jnp.sum(quantized), SMALLEST)
        # What is clipped piles up in the outermost bins of the range.
        first, final = jnp.argmax(inside), inside.size - 1 - jnp.argmax(inside[::-1])
        clipped = jnp.where(inside, shares, 0.0)
        clipped = clipped.at[first].add(jnp.sum(jnp.where(free < code, shares, 0.0)))
        clipped = clipped.at[final].add(jnp.sum(jnp.where(free > code, shares, 0.0)))
        ratio = jnp.maximum(clipped, SMALLEST) / jnp.maximum(quantized, SMALLEST)
        divergence = jnp.sum(jnp.where(clipped > 0, clipped * jnp.log(ratio), 0.0))
        # With fewer bins than codes there would be nothing to lose: one bin, to which all is clipped, is its own copy.
        return jnp.where(jnp.sum(inside) >= spec.levels, divergence, jnp.inf)

    better, *found = search(cost, cost, lo / unit, hi / unit, spec, floor=spec.eps / unit, gain=0.0)
    return jnp.where(better, found[0] * unit, min_val), jnp.where(better, found[1] * unit, max_val)
