"""Looking at one batch: its extremes, what counts in it, and in chunks where it is large."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jqobs.formats.quant_spec import QuantSpec
from jqobs.numerics.arithmetic import extremes
from jqobs.numerics.counting import Count, add, count, count_true
from jqobs.sharding.array_types import is_on_one_device

CHUNK = 2**18
"""Values that are summarized at a time: 1 MiB of float32, which stays in a cache, so that memory is read once."""


class BatchStats(NamedTuple):
    """What is asked of every batch: extremes and counts of each group."""

    min_val: jax.Array  # [*groups] float32
    max_val: jax.Array  # [*groups] float32
    seen: Count  # [*groups]
    nonfinite: Count  # [*groups]


def batch_stats(x: jax.Array, mask: jax.Array | None, spec: QuantSpec) -> BatchStats:
    """Looks at a batch; at one without a mask, on one device, and without NaN or infinities, with two reductions only.

    There the plain minimum and maximum are finite just when all values are. Across devices the NaN of one may be lost.
    """
    members = tuple(range(spec.rank, spec.split(x).ndim))

    def masked_stats() -> BatchStats:
        where = counted(x, mask)
        ignored = ~jnp.isfinite(x) if mask is None else ~jnp.isfinite(x) & mask
        ends = spec.vmap(extremes)(spec.split(x), spec.split(where))
        return BatchStats(
            ends[0], ends[1], count_true(spec.split(where), members), count_true(spec.split(ignored), members)
        )

    if mask is not None or not is_on_one_device(x):
        return masked_stats()
    low, high = spec.vmap(extremes)(spec.split(x), jnp.ones(spec.split(x).shape, bool))
    each = math.prod(spec.split(x).shape[axis] for axis in members)

    def fast() -> BatchStats:
        return BatchStats(low, high, count(each, low.shape), count(0, low.shape))

    return jax.lax.cond(jnp.all(jnp.isfinite(low) & jnp.isfinite(high)), fast, masked_stats)


def merge(a: BatchStats, b: BatchStats) -> BatchStats:
    """What was seen in two chunks."""
    return BatchStats(
        min_val=jnp.minimum(a.min_val, b.min_val),
        max_val=jnp.maximum(a.max_val, b.max_val),
        seen=add(a.seen, b.seen),
        nonfinite=add(a.nonfinite, b.nonfinite),
    )


def counted(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Which values count: the finite ones that no mask leaves out."""
    return jnp.isfinite(x) if mask is None else jnp.isfinite(x) & mask


def map_reduce_chunks(
    function: Callable[[jax.Array, jax.Array | None], Any],
    combine: Callable[[Any, Any], Any],
    x: jax.Array,
    mask: jax.Array | None,
    *,
    splits: bool,
) -> Any:
    """Applies a function of `(x, mask)` to a batch in float32, and combines its results over chunks that fit in a
    cache.

    A batch that is spread over devices stays whole, since cutting it would gather it, and so does one whose axes mean
    something.
    """
    if splits or not 2 * CHUNK <= x.size < 2**31 or not is_on_one_device(x):
        return function(x.astype(jnp.float32), mask)
    flat, chunks = x.reshape(-1), x.size // CHUNK
    kept = None if mask is None else jnp.broadcast_to(mask, x.shape).reshape(-1)

    def between(start: int | jax.Array, size: int) -> Any:
        part, part_kept = (
            None if each is None else jax.lax.dynamic_slice(each, (start,), (size,)) for each in (flat, kept)
        )
        return function(part.astype(jnp.float32), part_kept)  # pyright: ignore[reportOptionalMemberAccess]

    total = jax.lax.fori_loop(1, chunks, lambda i, total: combine(total, between(i * CHUNK, CHUNK)), between(0, CHUNK))
    rest = x.size - chunks * CHUNK
    return combine(total, between(chunks * CHUNK, rest)) if rest else total
