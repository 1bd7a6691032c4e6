"""A histogram whose bins never move: the bin of a value is the top bits of its own float32 representation."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jqobs.formats.qdtype import QDtype, quint8
from jqobs.formats.qscheme import QScheme, per_tensor_affine
from jqobs.numerics import counting
from jqobs.numerics.counting import Count, count
from jqobs.observers import _min_max
from jqobs.observers.lifting import lift
from jqobs.observers.observer import Observer
from jqobs.observers.statistic import Chunk, Statistic
from jqobs.range_rules import Range, mse
from jqobs.range_rules._rule import check_rule
from jqobs.recipe import factory
from jqobs.sharding import array_types as meshes

OCTAVES = range(-28, 20)
"""Magnitudes with bins of their own, as powers of two. Smaller ones share the first bin, larger ones the last."""

READ_OCTAVES = 10
"""Octaves below the largest magnitude that a range rule sees bin by bin: at 8 bits the first step is 8 octaves down."""


class LogHistogramState(NamedTuple):
    """The state of `log_histogram`."""

    histogram: Count  # [*groups, bins] values per bin; from -2**32 over 0, which has a bin of its own, to 2**32
    min_val: jax.Array  # [*groups] float32, +inf before any data
    max_val: jax.Array  # [*groups] float32, -inf before any data
    min_count: Count  # [*groups] how many values are the minimum itself
    max_count: Count  # [*groups] how many values are the maximum itself
    seen: Count  # [*groups] finite values folded in
    nonfinite: Count  # [*groups] NaN and infinities ignored


@factory
def log_histogram(
    *,
    bins_per_octave: int = 128,
    range_rule: Callable[..., Range] = mse(),
    qscheme: QScheme = per_tensor_affine,
    qdtype: QDtype = quint8,
    ch_axis: int | None = None,
    group_size: int | None = None,
    eps: float | None = None,
) -> Observer:
    """Tracks a histogram with logarithmic bins that are the same for all data.

    The right choice for activations. Since its bins never move, its state is a sum of integers: the same bits for any
    order of the batches, any way of cutting or sharding them, and any tree of merges.

    Args:
      bins_per_octave: Bins between a power of two and the next: a power of two itself.
      range_rule: Which range of the histogram is kept: `mse()`, `percentile(99.99)`, `entropy()`,
        `norm_minimization()`, or a function of your own (see `jqobs.RangeRule`). No part of the state.
      qscheme: The scheme of the grid; a per-channel one asks for a state per channel.
      qdtype: The type of the codes.
      ch_axis: The channel axis of the data; None leaves it to be bound later.
      group_size: How many values of a channel share a scale; None for all.
      eps: A floor under the scale; None for the grid's own.

    Returns:
      An observer with `LogHistogramState`, mergeable.

    Raises:
      ValueError: Arguments of another type, or that contradict one another.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> observer = jqobs.log_histogram()
      >>> x = jnp.array([0.0, 1.0, 1.001, 4.0])
      >>> state = observer.update(observer.init(x), x)
      >>> [int(n) for n in state.histogram.low if n], int(state.seen)
      ([1, 2, 1], 4)
    """
    if isinstance(bins_per_octave, bool) or bins_per_octave not in [2**bits for bits in range(1, 11)]:
        raise ValueError(f"bins_per_octave must be a power of two, 2 to 1024; got {bins_per_octave!r}")
    bins_per_octave = int(bins_per_octave)
    check_rule(range_rule)
    mantissa_bits = bins_per_octave.bit_length() - 1
    keys = len(OCTAVES) * bins_per_octave  # Of one sign.

    def init() -> LogHistogramState:
        return LogHistogramState(
            histogram=count(shape=(2 * keys + 1,)),
            min_val=jnp.float32(jnp.inf),
            max_val=jnp.float32(-jnp.inf),
            min_count=count(),
            max_count=count(),
            seen=count(),
            nonfinite=count(),
        )

    def summarize(chunk: Chunk, state: LogHistogramState) -> LogHistogramState:
        def how_many(end: jax.Array, beyond: jax.Array) -> Count:
            # Only where the extreme may become that of the state, which is rare once some batches have been seen.
            equal = lambda: jnp.sum(chunk.where & (chunk.x == end), dtype=jnp.uint32)  # noqa: E731
            return count(meshes.where(beyond, equal, jnp.uint32(0), like=chunk.x))

        return init()._replace(
            histogram=counting.tally(keys + signed_key(chunk.x, mantissa_bits, keys), chunk.where, 2 * keys + 1),
            min_val=chunk.min_val,
            max_val=chunk.max_val,
            min_count=how_many(chunk.min_val, chunk.min_val <= state.min_val),
            max_count=how_many(chunk.max_val, chunk.max_val >= state.max_val),
        )

    def bins(state: LogHistogramState) -> tuple[jax.Array, jax.Array]:
        return as_bins(state, bins_per_octave)

    statistic = Statistic(
        name="log_histogram",
        init=init,
        summarize=summarize,
        reduce=merge,
        fold=merge,
        merge=merge,
        bounds=_min_max.bounds,
        bins=bins,
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


def signed_key(x: jax.Array, mantissa_bits: int, keys: int) -> jax.Array:
    """The place of a value among the bins: 0 for zero, 1..keys by magnitude, with the sign of the value.

    The bits of a positive float32 are ordered like the number they stand for: exponent first, then mantissa. Shifting
    all but the first mantissa bits away leaves the number of the bin, without a logarithm. Subnormal numbers count as
    zeros, which is what some backends make of them anyway.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    magnitude = bits & 0x7FFFFFFF
    first = (127 + OCTAVES.start) << mantissa_bits
    key = jnp.clip((magnitude >> (23 - mantissa_bits)) - first, 0, keys - 1) + 1
    key = jnp.where(magnitude < 0x00800000, 0, key)
    return jnp.where(bits < 0, -key, key)


def merge(a: LogHistogramState, b: LogHistogramState) -> LogHistogramState:
    """Sums of counts, and the extremes of both with their multiplicities."""
    min_val, max_val = jnp.minimum(a.min_val, b.min_val), jnp.maximum(a.max_val, b.max_val)
    return a._replace(
        histogram=counting.add(a.histogram, b.histogram),
        min_val=min_val,
        max_val=max_val,
        min_count=counting.add(*(counting.only_where(s.min_val == min_val, s.min_count) for s in (a, b))),
        max_count=counting.add(*(counting.only_where(s.max_val == max_val, s.max_count) for s in (a, b))),
    )


def as_bins(state: LogHistogramState, bins_per_octave: int) -> tuple[jax.Array, jax.Array]:
    """The edges and counts that a range rule reads: the octaves below the largest magnitude, the rest in one bin a
    side.

    The extremes and zero come as bins of zero width. All edges are inside the extremes.
    """
    keys, kept = len(OCTAVES) * bins_per_octave, READ_OCTAVES * bins_per_octave
    mantissa_bits = bins_per_octave.bit_length() - 1
    magnitudes = np.append(((127 + OCTAVES.start) << mantissa_bits) + np.arange(keys), 0) << (23 - mantissa_bits)
    magnitudes = magnitudes.astype(np.int32).view(np.float32)
    magnitudes[0], magnitudes[-1] = 0, np.finfo(np.float32).max  # The first and the last bin hold the rest, too.

    ends = jnp.stack([state.min_val, state.max_val])
    low_key, high_key = signed_key(ends, mantissa_bits, keys)
    counts = counting.to_float(state.histogram)
    only_one = state.min_val == state.max_val
    of_ends = counting.to_float(state.min_count), jnp.where(only_one, 0.0, counting.to_float(state.max_count))
    counts = counts.at[keys + low_key].add(-of_ends[0]).at[keys + high_key].add(-of_ends[1])
    counts = jnp.maximum(counts, 0.0)

    first = jnp.maximum(jnp.maximum(jnp.abs(low_key), jnp.abs(high_key)) - kept, 0)
    negative, zeros, positive = counts[:keys][::-1], counts[keys], counts[keys + 1 :]
    small = jnp.arange(keys, dtype=jnp.int32) < first

    def side(counts: jax.Array) -> jax.Array:
        window = jax.lax.dynamic_slice(counts, (first,), (kept,))
        return jnp.append(jnp.sum(jnp.where(small, counts, 0.0)), window)

    window = jnp.append(
        jnp.zeros(1, jnp.float32), jax.lax.dynamic_slice(jnp.asarray(magnitudes), (first,), (kept + 1,))
    )
    edges = jnp.clip(jnp.concatenate([-window[::-1], window]), *ends)
    edges = jnp.concatenate([ends[:1], edges, ends[1:]])
    counts = jnp.concatenate([of_ends[0][None], side(negative)[::-1], zeros[None], side(positive), of_ends[1][None]])
    return edges, counts
