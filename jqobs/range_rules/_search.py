"""Searches for the best grid, coarse to fine. What is best is a cost function of the caller."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jqobs.formats.quant_spec import QuantSpec

Cost = Callable[[jax.Array, jax.Array], jax.Array]
"""`(steps_below, scale) -> cost`, of scalars: a grid is its step, and how many of its codes lie below zero."""

FINEST = 12
"""The smallest range that is tried, as a power of 1/2 of the full one."""


def search(
    rough: Cost, cost: Cost, lo: jax.Array, hi: jax.Array, spec: QuantSpec, *, floor: jax.Array, gain: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Finds the range in which a cost is smallest.

    A grid is searched as the deployed formula sees it, as a step and a whole number of codes below zero, and not as a
    pair of ends: the zero point is rounded, and at 2 or 4 bits that moves the ends by a good part of the range.

    Args:
      rough: The cost of a grid, near enough to begin with, and cheaper.
      cost: The cost of a grid.
      lo: The lower end of the full range, at most 0.
      hi: The upper end of the full range, at least 0.
      grid: The grid.
      floor: The smallest step.
      gain: The relative gain over the full range that counts.

    Returns:
      Whether a grid is better than that of the full range by `gain`, and the lower and the upper end of its range.
    """
    last = spec.levels - 1

    def unclipped(below: jax.Array) -> jax.Array:
        """The smallest step at which nothing is clipped but what the grid has no codes for."""
        above = last - below
        return jnp.maximum(jnp.where(below > 0, -lo / below, 0.0), jnp.where(above > 0, hi / above, 0.0))

    def full() -> tuple[jax.Array, jax.Array]:
        if spec.is_symmetric:
            return jnp.float32(spec.middle - spec.quant_min), jnp.maximum(jnp.maximum(-lo, hi) / (last / 2), floor)
        scale = jnp.maximum((hi - lo) / last, floor)
        return jnp.clip(jnp.round(-lo / scale), 0, last), scale

    def best_of(cost: Cost, below: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        below, scale = below.ravel(), jnp.clip(scale.ravel(), floor, full_scale)  # Never wider than the values are.
        costs = jax.vmap(cost)(below, scale)
        best = jnp.argmin(jnp.where(jnp.isnan(costs), jnp.inf, costs))
        return costs[best], below[best], scale[best]

    full_below, full_scale = full()
    coarse = jnp.atleast_1d(full_below) if spec.is_symmetric else jnp.append(jnp.asarray(_spread(last)), full_below)
    fractions = 2.0 ** -(np.arange(0, FINEST * 4 + 1) / 4.0).astype(np.float32)
    pairs = jnp.broadcast_arrays(coarse[:, None], unclipped(coarse)[:, None] * fractions[None])
    best, below, scale = best_of(rough, *pairs)
    for judge, reach, octaves in zip((rough, cost, cost), *_refinements(last), strict=True):
        near = jnp.atleast_1d(below) if spec.is_symmetric else jnp.clip(below + reach, 0, last)
        steps = scale * 2.0 ** np.linspace(-octaves, octaves, 13, dtype=np.float32)
        # The ends themselves too: values that were clipped to a bound pile up there.
        anchored = jnp.stack([unclipped(near), jnp.where(near < last, hi / (last - near), scale)], -1)
        anchored = jnp.concatenate([anchored, jnp.where(near > 0, -lo / near, scale)[:, None]], -1)
        tried = jnp.concatenate([jnp.broadcast_to(steps, (near.size, 13)), anchored], -1)
        best, below, scale = best_of(judge, *jnp.broadcast_arrays(near[:, None], tried))
    better = best < (1 - gain) * cost(full_below, full_scale)
    ends = (-scale * (last / 2), scale * (last / 2)) if spec.is_symmetric else (-below * scale, (last - below) * scale)
    return better, *ends


def _spread(last: int) -> np.ndarray:
    """Numbers of codes below zero to begin with: all for a few, else denser towards both ends."""
    if last < 32:
        return np.arange(last + 1, dtype=np.float32)
    near = 2 ** np.arange(int(np.log2(last)) - 2)
    evenly = np.linspace(0, last, 9).round()
    return np.unique(np.concatenate([near, evenly, last - near])).astype(np.float32)


def _refinements(last: int) -> tuple[list[np.ndarray], list[float]]:
    """How far to look from the best so far, in codes below zero and in octaves of the step: ever closer."""
    gap = max(last // 8, 1)
    reaches = np.unique(np.linspace(-gap, gap, 9).round()), np.arange(-2, 3) * max(gap // 12, 1), np.arange(-1, 2)
    return [reach.astype(np.float32) for reach in reaches], [0.3, 0.05, 0.01]
