"""The range in which the values of a histogram are quantized with the smallest squared error."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jqobs.formats.quant_spec import QuantSpec
from jqobs.range_rules._bins import mean_errors, thinned
from jqobs.range_rules._rule import Range, RangeRule
from jqobs.range_rules._search import Cost, search
from jqobs.recipe import factory

LEAST_GAIN = 0.002
"""The full range is left for a gain of a fifth of a percent: less is within what a histogram can tell."""

NO_ACCIDENT = 14.0
"""That values lie on a grid is believed at odds of exp(14), a million to one."""


@factory
def mse() -> RangeRule:
    """Minimizes the mean squared error of the grid that will be deployed.

    The default: within a percent of the best range there is, at any number of bits. It knows the number of codes, the
    scheme, the rounding of the zero point and the widening to zero. The full range is always a candidate, and is left
    only for a real gain, so the result is never worse than the extremes; data that the full grid holds exactly (images
    of 8 bits at 8 bits) keeps it.

    Returns:
      A rule for `range_rule=`.

    Example:
      >>> import jax, jqobs
      >>> x = jax.random.normal(jax.random.key(0), (100_000,)).at[0].set(50.0)
      >>> observer = jqobs.log_histogram(qdtype=jqobs.quint4, range_rule=jqobs.mse())
      >>> scale, _ = observer.calculate_qparams(observer.update(observer.init(x), x))
      >>> bool(15 * scale < 8)
      True

    References:
      Values of a bin are taken as uniform, those of a bin without width as a point: `_bins.mean_errors`.
    """
    return RangeRule(choose)


def choose(edges: jax.Array, counts: jax.Array, min_val: jax.Array, max_val: jax.Array, spec: QuantSpec) -> Range:
    """See `mse`."""
    lo, hi = jnp.minimum(min_val, 0.0), jnp.maximum(max_val, 0.0)
    if spec.levels > 2**16:
        return lo, hi  # float32 has no digits left to tell ranges apart.
    # In units of the largest value: cubes of steps must neither overflow nor vanish.
    unit = jnp.maximum(jnp.maximum(-lo, hi), spec.eps)
    lo, hi, edges = lo / unit, hi / unit, edges / unit
    shares = counts / jnp.maximum(jnp.sum(counts), 1.0)
    rough, cost = squared_error(*thinned(edges, shares, 8), spec), squared_error(edges, shares, spec)
    better, *found = search(rough, cost, lo, hi, spec, floor=spec.eps / unit, gain=LEAST_GAIN)
    left = better & ~holds_exactly(edges, counts, lo, hi, spec)
    return jnp.where(left, found[0] * unit, min_val), jnp.where(left, found[1] * unit, max_val)


def squared_error(edges: jax.Array, shares: jax.Array, spec: QuantSpec) -> Cost:
    """The mean squared error of a grid, as a function of its number of codes below zero and of its step."""

    def cost(below: jax.Array, scale: jax.Array) -> jax.Array:
        code = jnp.clip(jnp.round(edges / scale), -below, spec.levels - 1 - below)
        return jnp.sum(shares * mean_errors(edges, code, edges - code * scale, scale))

    return cost


def holds_exactly(edges: jax.Array, counts: jax.Array, lo: jax.Array, hi: jax.Array, spec: QuantSpec) -> jax.Array:
    """Whether the values seem to lie on the codes of the full range, so that their error there is 0.

    So it is if every bin that is not empty has a code in it, and if that would be a strange accident: a bin of width
    `w` has a code in it with probability `w / s`. A histogram cannot tell more, and the cost, which takes the values of
    a bin to be spread over it, would give an error of 0 away for a smaller step.
    """
    scale = (hi - lo) / (spec.levels - 1)
    if spec.is_symmetric:
        scale = jnp.maximum(-lo, hi) / ((spec.levels - 1) / 2)
    places = edges / jnp.maximum(scale, jnp.finfo(jnp.float32).smallest_normal)
    slack = 1e-5 * jnp.abs(places)
    hit = jnp.ceil((places - slack)[:-1]) <= jnp.floor((places + slack)[1:])
    width = places[1:] - places[:-1]
    surprise = jnp.sum(jnp.where((counts > 0) & (width > 0), -jnp.log(jnp.clip(width, 1e-9, 1.0)), 0.0))
    return jnp.all(hit | (counts == 0)) & (surprise > NO_ACCIDENT)
