"""The walk of PyTorch: clips the thinner tail, little by little, until the error grows."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jqobs.formats.quant_spec import QuantSpec
from jqobs.numerics.arithmetic import divide
from jqobs.range_rules._bins import mean_errors
from jqobs.range_rules._rule import Range, RangeRule
from jqobs.recipe import factory

STEPS = 100_000
"""Quantiles are moved in steps of one in so many."""


class _Walk(NamedTuple):
    left: jax.Array  # int32, steps that the lower quantile has moved
    right: jax.Array  # int32, steps that the upper quantile has moved
    start: jax.Array  # int32, the first bin of the range
    end: jax.Array  # int32, its last bin
    norm: jax.Array  # float32, the error of the range
    over: jax.Array  # bool, whether the error grew


@factory
def norm_minimization() -> RangeRule:
    """Repeats the search of PyTorch, to compare with.

    It moves the lower or the upper quantile, whichever frees fewer bins, and stops at the first step that makes the
    error larger. It models cells whose first one begins at the lower end, not codes around zero, and it never tries to
    keep the full range. The number of codes is the grid's; the reference takes it from the width of the type.
    `mse()` is the better rule.

    Returns:
      A rule for `range_rule=`.

    Example:
      >>> import jax, jqobs
      >>> x = jax.random.normal(jax.random.key(0), (2000,)).at[0].set(50.0)
      >>> observer = jqobs.histogram(range_rule=jqobs.norm_minimization())
      >>> state = observer.update(observer.init(x), x)
      >>> bool(255 * observer.calculate_qparams(state).scale < state.max_val - state.min_val)
      True

    References:
      `HistogramObserver._non_linear_param_search` of `torch.ao.quantization`, which follows `NormMinimization` of
      Caffe2.
    """
    return RangeRule(choose)


def choose(edges: jax.Array, counts: jax.Array, min_val: jax.Array, max_val: jax.Array, spec: QuantSpec) -> Range:
    """See `norm_minimization`."""
    del min_val, max_val
    below = jnp.cumsum(counts)
    total = below[-1]

    def quantile(steps: jax.Array) -> jax.Array:
        return divide(steps.astype(jnp.float32) * total, float(STEPS))

    def step(walk: _Walk) -> _Walk:
        first = jnp.searchsorted(below, quantile(walk.left + 1), side="left").astype(jnp.int32)
        last = jnp.searchsorted(below, quantile(STEPS - walk.right - 1), side="right").astype(jnp.int32) - 1
        first, last = (jnp.clip(i, walk.start, walk.end) for i in (first, last))
        moves_start = first - walk.start > walk.end - last
        start, end = jnp.where(moves_start, first, walk.start), jnp.where(moves_start, walk.end, last)
        moved = (start != walk.start) | (end != walk.end)
        norm = jax.lax.cond(
            moved, lambda: squared_error(edges, counts, edges[start], edges[end + 1], spec), lambda: walk.norm
        )
        over = norm > walk.norm
        return _Walk(
            left=walk.left + moves_start.astype(jnp.int32),
            right=walk.right + (~moves_start).astype(jnp.int32),
            start=jnp.where(over, walk.start, start),
            end=jnp.where(over, walk.end, end),
            norm=jnp.where(over, walk.norm, norm),
            over=over,
        )

    none = jnp.int32(0)
    begin = _Walk(none, none, none, jnp.int32(counts.size - 1), jnp.float32(jnp.inf), jnp.bool_(False))
    walk = jax.lax.while_loop(lambda walk: ~walk.over & (walk.left + walk.right < STEPS), step, begin)
    return edges[walk.start], edges[walk.end + 1]


def squared_error(edges: jax.Array, counts: jax.Array, low: jax.Array, high: jax.Array, spec: QuantSpec) -> jax.Array:
    """The error of cells of equal width from `low` to `high`, each value at the middle of its cell."""
    cell = (high - low) / spec.levels
    safe = jnp.where(cell > 0, cell, 1.0)
    index = jnp.clip(jnp.floor((edges - low) / safe), 0, spec.levels - 1)
    errors = mean_errors(edges, index, edges - low - (index + 0.5) * cell, cell)
    return jnp.where(cell > 0, jnp.sum(counts * errors), 0.0)
