"""From a statistic of one group of values to an observer of whole arrays.

This is the only place that knows channels, groups, masks, empty batches, non-finite values, tracing and mapped axes.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jqobs.counting import add, count, is_positive
from jqobs.granularity import Granularity
from jqobs.observer import MergeFn, NotCalibratedError, Observer, Recipe, State, Statistic, is_calibrated
from jqobs.qparams import QParams, map_range
from jqobs.qtypes import Grid, QDtype, QScheme

_LARGEST = float(np.finfo(np.float32).max)


def lift(
    statistic: Statistic,
    *,
    qscheme: QScheme,
    qdtype: QDtype,
    ch_axis: int | None = None,
    group_size: int | None = None,
    eps: float | None = None,
) -> Observer:
    """Makes an observer of a statistic: one state per tensor, channel or group, by `jax.vmap`.

    Call it in a function decorated with `jqobs.factory`, whose keyword arguments it takes.

    Args:
      statistic: What is remembered of one group of values.
      qscheme: The scheme of the grid; a per-channel one asks for a state per channel.
      qdtype: The type of the codes.
      ch_axis: The channel axis of the data; None leaves it to be bound by `observer.replace(ch_axis=...)`.
      group_size: How many values of a channel share a scale; None for all.
      eps: A floor under the scale; None for the grid's own.

    Returns:
      An observer whose states have the leaves of the statistic's, with `()`, `[channels]` or `[channels, groups]` in
      front. Its grid and its granularity are in no state.

    Raises:
      ValueError: Arguments that contradict one another.

    Example:
      >>> import jqobs
      >>> from jqobs.observers._min_max import STATISTIC
      >>> observer = jqobs.lift(STATISTIC, qscheme=jqobs.per_channel_symmetric, qdtype=jqobs.qint8, ch_axis=-1)
      >>> observer.init(jax.ShapeDtypeStruct((2, 3), jnp.float32)).min_val.shape
      (3,)
    """
    grid = Grid(qscheme, qdtype, eps)  # pyright: ignore[reportArgumentType]  (None stands for the default)
    granularity = Granularity(qscheme, ch_axis, group_size)

    def init(x: Any) -> State:
        x = x if hasattr(x, "shape") and hasattr(x, "dtype") else jnp.asarray(x)
        _check_real(x.dtype)
        shape = granularity.shape_for(x.shape)
        # A copy of each leaf, even of equal ones: leaves that share a buffer cannot be donated.
        return jax.tree.map(
            lambda leaf: jnp.array(jnp.broadcast_to(leaf, shape + leaf.shape), copy=True), statistic.init()
        )

    def update(state: State, x: Any, *, mask: Any = None, axis_name: Hashable | None = None) -> State:
        x = jnp.asarray(x)
        if not x.size:
            return state
        _check_real(x.dtype)
        mask = None if mask is None else _checked_mask(jnp.asarray(mask), x.shape)
        have, need = shape_of(state), granularity.shape_for(x.shape)
        if have != need:
            raise ValueError(
                f"{statistic.name}: the state is for {_in_words(have)} and x of shape {x.shape} has {_in_words(need)}; "
                "the number of channels and groups may not change between batches"
            )
        return folded(state, jax.lax.stop_gradient(x), mask, axis_name)

    def fold(state: State, x: jax.Array, mask: jax.Array | None, axis_name: Hashable | None) -> State:
        x = x.astype(jnp.float32)
        finite = jnp.isfinite(x)
        where = finite if mask is None else finite & mask
        ignored = ~finite if mask is None else ~finite & mask
        x, where, ignored = (granularity.split(each) for each in (x, where, ignored))
        summary = granularity.vmap(statistic.summarize)(x, where)
        counted = tuple(range(granularity.rank, x.ndim))
        seen, nonfinite = (jnp.sum(each, counted, dtype=jnp.uint32) for each in (where, ignored))
        summary = summary._replace(seen=count(seen), nonfinite=count(nonfinite))
        if axis_name is not None:
            summary = reduce_across(joining(statistic.reduce), summary, axis_name)
        after = joining(statistic.fold)(state, summary)
        # Nothing but the counters may move for a group whose part of the batch is empty.
        empty_part = ~is_positive(summary.seen)
        kept = jax.tree.map(lambda old, new: jnp.where(_trailing(empty_part, new.ndim), old, new), state, after)
        return kept._replace(nonfinite=after.nonfinite)

    folded = jax.jit(fold, static_argnums=3)

    def joining(combine: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """The statistic's `reduce`, `fold` or `merge`, over all groups, with the counters added."""

        def join(a: Any, b: Any) -> Any:
            joined = granularity.vmap(combine)(a, b)
            return joined._replace(seen=add(a.seen, b.seen), nonfinite=add(a.nonfinite, b.nonfinite))

        return join

    def read(state: State) -> tuple[jax.Array, jax.Array]:
        min_val, max_val = granularity.vmap(lambda each: statistic.bounds(each, grid))(state)
        seen = is_calibrated(state)
        # Unseen groups keep sentinels: 0..0 gives them the scale eps. A sum that overflowed still names a finite range.
        min_val, max_val = (jnp.where(seen, jnp.clip(end, -_LARGEST, _LARGEST), 0.0) for end in (min_val, max_val))
        scale, zero_point = map_range(min_val, max_val, grid)
        return jnp.where(jnp.any(seen), scale, 1.0), jnp.where(jnp.any(seen), zero_point, 0)

    @functools.partial(jax.jit, static_argnums=1)
    def compiled(state: State, stack: int) -> tuple[jax.Array, jax.Array]:
        mapped = read
        for _ in range(stack):  # Axes in front of the groups' own: states stacked by a scan over layers.
            mapped = jax.vmap(mapped)
        return mapped(state)

    def calculate_qparams(state: State) -> QParams:
        if state is None:
            raise NotCalibratedError(f"{statistic.name} has no state: it was never shown any data")
        stack = len(shape_of(state)) - granularity.rank
        if stack < 0:
            raise ValueError(
                f"{statistic.name}: the state is for {_in_words(shape_of(state))}; {qscheme!r} with "
                f"group_size={group_size} reads states of rank {granularity.rank}"
            )
        if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(state)):
            # On the host the state has no mesh left in its type, so that one program serves all: equal bits anywhere.
            state = jax.device_get(state)
            _report_unseen(statistic.name, np.asarray(state.seen) > 0)
        scale, zero_point = compiled(state, stack)
        return QParams(scale, zero_point, qdtype, qscheme, granularity.ch_axis, granularity.group_size)

    def shape_of(state: State) -> tuple[int, ...]:
        empty = jax.eval_shape(statistic.init)  # Not at the top: building an observer must not start a backend.
        if jax.tree.structure(state) != jax.tree.structure(empty):
            raise ValueError(f"{statistic.name}: state must be a {type(empty).__name__}; got a {type(state).__name__}")
        return state.seen.shape

    def merging(joined: Callable[[State, State], State]) -> MergeFn:
        def merge(a: State, b: State) -> State:
            one, other = shape_of(a), shape_of(b)
            if one != other:
                raise ValueError(f"{statistic.name}: cannot merge states of {_in_words(one)} and {_in_words(other)}")
            return joined(a, b)

        return merge

    merge = None if statistic.merge is None else merging(jax.jit(joining(statistic.merge)))
    return Observer(init, update, merge, calculate_qparams, Recipe(lift))


def reduce_across(combine: Callable[[Any, Any], Any], part: Any, axis_name: Hashable) -> Any:
    """Combines the parts that the devices of a mapped axis hold; each gets the whole.

    Parts are gathered and folded in a tree, so that any exact `combine` is exact here, without a collective of its own.
    """
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    # Inside shard_map the type has to say that all devices hold the same; an axis of vmap has no such type.
    manual = set(names) <= set(jax.sharding.get_abstract_mesh().manual_axes)
    gather = functools.partial(jax.lax.all_gather, axis_name=axis_name, to="invarying" if manual else "varying")
    return reduce_leading(combine, jax.tree.map(gather, part))


def reduce_leading(combine: Callable[[Any, Any], Any], stacked: Any) -> Any:
    """Combines the slices along the leading axis of every leaf, pairwise, in a tree.

    Example:
      >>> import jax.numpy as jnp
      >>> from jqobs.lifting import reduce_leading
      >>> reduce_leading(jnp.add, jnp.arange(5)).item()
      10
    """
    parts = [jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(jax.tree.leaves(stacked)[0].shape[0])]
    while len(parts) > 1:
        pairs = [combine(*parts[i : i + 2]) for i in range(0, len(parts) - 1, 2)]
        parts = pairs + parts[len(parts) & ~1 :]
    return parts[0]


def _check_real(dtype: Any) -> None:
    if not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_):
        raise ValueError(f"x must hold real numbers; got {dtype}")


def _checked_mask(mask: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if not (jnp.issubdtype(mask.dtype, jnp.integer) or mask.dtype == jnp.bool_):
        raise ValueError(f"mask must be boolean (or 0 and 1); got {mask.dtype}")
    fits = len(mask.shape) == len(shape) and all(m in (1, n) for m, n in zip(mask.shape, shape, strict=True))
    if not fits:
        raise ValueError(
            f"mask must have the rank of x, each axis of its size or of size 1; got mask {mask.shape} for x {shape}. "
            "Add the missing axes where they belong: mask[..., None] for (batch, time) on (batch, time, features)"
        )
    return mask.astype(jnp.bool_)


def _trailing(flag: jax.Array, rank: int) -> jax.Array:
    return flag.reshape(flag.shape + (1,) * (rank - flag.ndim))


def _in_words(shape: tuple[int, ...]) -> str:
    if len(shape) > 2:
        return f"groups of shape {shape}"
    names = ("channel", "group")[: len(shape)]
    return " x ".join(f"{n} {name}{'s' * (n != 1)}" for n, name in zip(shape, names, strict=True)) or "a whole tensor"


def _report_unseen(name: str, seen: np.ndarray) -> None:
    if not seen.any():
        raise NotCalibratedError(f"{name} has seen no finite value; update its state with data before reading it")
    if not seen.all():
        missing = [tuple(map(int, index)) for index in np.argwhere(~seen)]
        first = ", ".join(str(index[0] if len(index) == 1 else index) for index in missing[:5])
        warnings.warn(
            f"{name}: {len(missing)} of {seen.size} channels or groups saw no data and get the smallest scale: {first}"
            + ", ..." * (len(missing) > 5),
            stacklevel=3,
        )
