"""A histogram with bins of equal width over the running range, as PyTorch keeps it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jqobs.formats.qdtype import QDtype, quint8
from jqobs.formats.qscheme import QScheme, per_tensor_affine
from jqobs.numerics import counting
from jqobs.numerics.arithmetic import divide
from jqobs.numerics.counting import Count, count
from jqobs.observers import _min_max
from jqobs.observers.lifting import lift
from jqobs.observers.observer import Observer
from jqobs.observers.statistic import Chunk, Statistic
from jqobs.range_rules import Range, mse
from jqobs.range_rules._rule import check_rule
from jqobs.recipe import factory
from jqobs.sharding import array_types as meshes

UPSAMPLE_RATE = 16
"""Into how many parts an old bin is cut when the range grows; each part goes where its middle lies."""


class HistogramState(NamedTuple):
    """The state of `histogram`."""

    histogram: Count  # [*groups, bins] values per bin, of equal width from min_val to max_val, both included
    min_val: jax.Array  # [*groups] float32, +inf before any data
    max_val: jax.Array  # [*groups] float32, -inf before any data
    seen: Count  # [*groups] finite values folded in
    nonfinite: Count  # [*groups] NaN and infinities ignored


@factory
def histogram(
    *,
    bins: int = 2048,
    range_rule: Callable[..., Range] = mse(),
    qscheme: QScheme = per_tensor_affine,
    qdtype: QDtype = quint8,
    ch_axis: int | None = None,
    group_size: int | None = None,
    eps: float | None = None,
) -> Observer:
    """Tracks a histogram with bins of equal width over the range seen so far.

    For comparisons with other frameworks, with `range_rule=norm_minimization()`; `log_histogram` is the better one.
    When the range grows, old bins are cut into 16 parts that move to the new bins by their middles. No value is lost,
    but it may end up a bin away from its place, so **the result depends a little on the order of the batches, and a
    merge is right to within a bin**; and one far outlier leaves all other values in few bins.

    Args:
      bins: The number of bins, 2 to 4096; memory is this much, whatever the values.
      range_rule: Which range of the histogram is kept: `mse()`, `percentile(99.99)`, `entropy()`,
        `norm_minimization()`, or a function of your own (see `jqobs.RangeRule`). No part of the state.
      qscheme: The scheme of the grid; a per-channel one asks for a state per channel.
      qdtype: The type of the codes.
      ch_axis: The channel axis of the data; None leaves it to be bound later.
      group_size: How many values of a channel share a scale; None for all.
      eps: A floor under the scale; None for the grid's own.

    Returns:
      An observer with `HistogramState`, mergeable to within a bin.

    Raises:
      ValueError: Arguments of another type, or that contradict one another.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> observer = jqobs.histogram(bins=10)
      >>> state = jqobs.calibrate(observer, [jnp.array([5.0, 5.0, 5.0, 5.0]), jnp.array([0.0, 10.0])])
      >>> state.histogram
      Count([1, 0, 0, 0, 0, 4, 0, 0, 0, 1])

    References:
      `torch.ao.quantization.observer.HistogramObserver`, whose fractional parts are whole numbers here.
    """
    if isinstance(bins, bool) or bins not in range(2, 4097):
        raise ValueError(f"bins must be an integer from 2 to 4096; got {bins!r}")
    check_rule(range_rule)

    def init() -> HistogramState:
        return HistogramState(
            histogram=count(shape=(bins,)),
            min_val=jnp.float32(jnp.inf),
            max_val=jnp.float32(-jnp.inf),
            seen=count(),
            nonfinite=count(),
        )

    def summarize(chunk: Chunk, state: HistogramState) -> HistogramState:
        index = bin_of(chunk.x, state.min_val, state.max_val, bins)
        return init()._replace(histogram=counting.tally(index, chunk.where, bins))

    def bins_of(state: HistogramState) -> tuple[jax.Array, jax.Array]:
        up = np.linspace(0, 1, bins + 1, dtype=np.float32)
        edges = state.min_val * up[::-1] + state.max_val * up
        return edges, counting.to_float(state.histogram)

    statistic = Statistic(
        name="histogram",
        init=init,
        summarize=summarize,
        reduce=fold,
        fold=fold,
        merge=merge,
        bounds=_min_max.bounds,
        extend_range=extend_range,
        bins=bins_of,
    )
    return lift(
        statistic,
        range_rule=range_rule,
        qscheme=qscheme,
        qdtype=qdtype,
        ch_axis=ch_axis,
        group_size=group_size,
        eps=eps,
    )


def bin_of(x: jax.Array, min_val: jax.Array, max_val: jax.Array, bins: int) -> jax.Array:
    """The bin of each value; what is outside goes to the nearest bin, and a range without width is all in the first."""
    # Halves first: the width of float32's own range is infinite.
    width = max_val / 2 - min_val / 2
    density = jnp.minimum(divide(jnp.float32(bins) + 0 * width, width), jnp.finfo(jnp.float32).max)
    place = jnp.where(width > 0, (x / 2 - min_val / 2) * density, 0.0)
    return jnp.clip(jnp.floor(place), 0, bins - 1).astype(jnp.int32)


def extend_range(state: HistogramState, min_val: jax.Array, max_val: jax.Array) -> HistogramState:
    """The same values over a range that holds `min_val..max_val`, too."""
    low, high = jnp.minimum(state.min_val, min_val), jnp.maximum(state.max_val, max_val)
    bins = state.histogram.low.shape[-1]

    def moved() -> Count:
        up = ((np.arange(bins * UPSAMPLE_RATE) + 0.5) / (bins * UPSAMPLE_RATE)).astype(np.float32)
        middles = state.min_val * (1 - up) + state.max_val * up
        parts = jax.tree.map(jnp.ravel, counting.split(state.histogram, UPSAMPLE_RATE))
        return counting.tally_counts(bin_of(middles, low, high, bins), parts, bins)

    grows = (low != state.min_val) | (high != state.max_val)
    histogram = meshes.where(grows, moved, state.histogram, like=min_val)
    return state._replace(histogram=histogram, min_val=low, max_val=high)


def fold(state: HistogramState, batch: HistogramState) -> HistogramState:
    """More values over the same range."""
    return state._replace(histogram=counting.add(state.histogram, batch.histogram))


def merge(a: HistogramState, b: HistogramState) -> HistogramState:
    """The values of both, over the range of both."""
    return fold(extend_range(a, b.min_val, b.max_val), extend_range(b, a.min_val, a.max_val))
