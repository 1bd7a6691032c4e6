"""From a statistic of one group of values to an observer of whole arrays.

Statistics know nothing of channels, groups, masks, empty batches, non-finite values, tracing and devices: all of it is
put together here, from the parts in `formats`, `batches` and `sharding`.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jqobs.formats.qdtype import QDtype, quint8
from jqobs.formats.qscheme import QScheme, per_tensor_affine
from jqobs.formats.quant_spec import QuantSpec
from jqobs.numerics.counting import add, is_positive
from jqobs.numerics.inputs import as_array, as_mask, described
from jqobs.observers.batches import BatchStats, batch_stats, counted, map_reduce_chunks, merge
from jqobs.observers.observer import NotCalibratedError, Observer, is_calibrated
from jqobs.observers.statistic import Chunk, State, Statistic
from jqobs.quantization.qparams import QParams, map_range
from jqobs.recipe import Recipe, factory
from jqobs.sharding.array_types import across_explicit_axes, reduce_across

BLOCK = 64
"""Groups whose range is searched at a time."""

_LARGEST = float(np.finfo(np.float32).max)


@factory
def lift(
    statistic: Statistic,
    *,
    range_rule: Callable[..., tuple[jax.Array, jax.Array]] | None = None,
    qscheme: QScheme = per_tensor_affine,
    qdtype: QDtype = quint8,
    ch_axis: int | None = None,
    group_size: int | None = None,
    eps: float | None = None,
) -> Observer:
    """Makes an observer of a statistic: one state per tensor, channel or group, by `jax.vmap`.

    Called in a function decorated with `jqobs.factory`, the observer is printed as that; it is an observer like any
    other without one.

    Args:
      statistic: What is remembered of one group of values.
      range_rule: Which range of the statistic's `bins` is kept; None: its `bounds`.
      qscheme: The scheme; a per-channel one asks for a state per channel.
      qdtype: The type of the codes.
      ch_axis: The channel axis of the data; None leaves it to be bound by `observer.replace(ch_axis=...)`.
      group_size: How many values of a channel share a scale; None for all.
      eps: A floor under the scale; None for the type's own.

    Returns:
      An observer whose states have the leaves of the statistic's, with `()`, `[channels]` or `[channels, groups]` in
      front. Its spec is in no state.

    Raises:
      ValueError: Arguments that contradict one another.

    Example:
      >>> import jqobs
      >>> from jqobs.observers._min_max import STATISTIC
      >>> observer = jqobs.lift(STATISTIC, qscheme=jqobs.per_channel_symmetric, qdtype=jqobs.qint8, ch_axis=-1)
      >>> observer.init(jax.ShapeDtypeStruct((2, 3), jnp.float32)).min_val.shape
      (3,)
    """
    if range_rule is not None and statistic.bins is None:
        raise ValueError(f"range_rule needs a statistic with bins, that is a histogram; {statistic.name} has none")
    if range_rule is not None and not callable(range_rule):
        raise ValueError(f"range_rule must be a rule such as jqobs.mse(), or a function; got {range_rule!r}")
    spec = QuantSpec(qdtype, qscheme, ch_axis, group_size, eps)  # pyright: ignore[reportArgumentType]  (None: its own)
    return observer_of(_Lifted(statistic, range_rule, spec))


def observer_of(lifted: _Lifted) -> Observer:
    """The functions of a lifted statistic, as an observer."""
    return Observer(
        init=lifted.init,
        update=lifted.update,
        merge=None if lifted.statistic.merge is None else lifted.merge,
        calculate_qparams=lifted.calculate_qparams,
        recipe=Recipe(lift),
        spec=lifted.spec,
        range_rule=lifted.range_rule,
        with_spec=lifted.with_spec,
    )


@dataclasses.dataclass(frozen=True)
class _Lifted:
    """The four functions of an observer: checks in front, compiled functions behind."""

    statistic: Statistic
    range_rule: Callable[..., tuple[jax.Array, jax.Array]] | None
    spec: QuantSpec

    def with_spec(self, spec: QuantSpec) -> Observer:
        return observer_of(dataclasses.replace(self, spec=spec))

    def init(self, x: Any) -> State:
        x = described(x)
        _check_real(x.dtype)
        shape = self.spec.shape_for(x.shape)

        def own(leaf: jax.Array) -> jax.Array:
            # A copy of each leaf, even of equal ones: leaves that share a buffer cannot be donated. With a dtype: a
            # weakly typed leaf would compile the second step again.
            return jnp.array(jnp.broadcast_to(leaf, shape + leaf.shape), leaf.dtype, copy=True)

        return jax.tree.map(own, self.statistic.init())

    def update(self, state: State, x: Any, *, mask: Any = None, axis_name: Hashable | None = None) -> State:
        x = as_array(x)
        if not x.size:
            return state
        _check_real(x.dtype)
        mask = None if mask is None else _checked_mask(as_mask(mask), x.shape)
        have, need = self.shape_of(state), self.spec.shape_for(x.shape)
        if have != need:
            raise ValueError(
                f"{self.statistic.name}: the state is for {_in_words(have)} and x of shape {x.shape} has "
                f"{_in_words(need)}; the number of channels and groups may not change between batches"
            )
        fold = functools.partial(self._update, axis_name=axis_name)
        return across_explicit_axes(fold, state, jax.lax.stop_gradient(x), mask)

    def merge(self, a: State, b: State) -> State:
        one, other = self.shape_of(a), self.shape_of(b)
        if one != other:
            raise ValueError(f"{self.statistic.name}: cannot merge states of {_in_words(one)} and {_in_words(other)}")
        return self._merge(a, b)

    def calculate_qparams(self, state: State) -> QParams:
        name, how = self.statistic.name, self.spec
        if state is None:
            raise NotCalibratedError(f"{name} has no state: it was never shown any data")
        if len(self.shape_of(state)) < how.rank:
            raise ValueError(
                f"{name}: the state is for {_in_words(self.shape_of(state))}; {how.qscheme!r} with "
                f"group_size={how.group_size} reads states of rank {how.rank}"
            )
        if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(state)):
            # On the host the state has no mesh left in its type, so that one program serves all: equal bits anywhere.
            state = jax.device_get(state)
            _report_unseen(name, np.asarray(state.seen) > 0)
        scale, zero_point = self._qparams(state)
        return QParams(scale, zero_point, how)

    @functools.cached_property
    def empty(self) -> State:
        """The shapes and dtypes of a state of one group."""
        return jax.eval_shape(self.statistic.init)  # Abstract: building an observer must not start a backend.

    def shape_of(self, state: State) -> tuple[int, ...]:
        if jax.tree.structure(state) != jax.tree.structure(self.empty):
            expected = type(self.empty).__name__
            raise ValueError(f"{self.statistic.name}: state must be a {expected}; got a {type(state).__name__}")
        shape = state.seen.shape
        for (path, leaf), own in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(self.empty), strict=True):
            if leaf.shape != shape + own.shape:
                raise ValueError(
                    f"{self.statistic.name}: {jax.tree_util.keystr(path)[1:]} of the state must have shape "
                    f"{shape + own.shape}, that of `seen` and then its own; got {leaf.shape}"
                )
        return shape

    @functools.partial(jax.jit, static_argnums=0, static_argnames="axis_name")
    def _update(self, state: State, x: jax.Array, mask: jax.Array | None, axis_name: Hashable | None) -> State:
        """The state after a batch."""
        statistic, how = self.statistic, self.spec

        def look(x: jax.Array, mask: jax.Array | None) -> BatchStats:
            return batch_stats(x, mask, how)

        def summarize(x: jax.Array, where: jax.Array, seen: BatchStats, state: State) -> Any:
            chunk = Chunk(how.split(x), how.split(where), seen.min_val, seen.max_val)
            return how.vmap(statistic.summarize)(chunk, state)._replace(seen=seen.seen, nonfinite=seen.nonfinite)

        def whole(function: Callable[..., Any], combine: Callable[[Any, Any], Any]) -> Any:
            result = map_reduce_chunks(function, combine, x, mask, splits=how.rank > 0)
            return result if axis_name is None else reduce_across(combine, result, axis_name)

        if statistic.extend_range is None:
            ready = state
            summary = whole(
                lambda x, mask: summarize(x, counted(x, mask), look(x, mask), state), self.joining(statistic.reduce)
            )
        else:
            seen = whole(look, merge)
            ready = how.vmap(statistic.extend_range)(state, seen.min_val, seen.max_val)
            summary = whole(lambda x, mask: summarize(x, counted(x, mask), seen, ready), how.vmap(statistic.reduce))
            summary = summary._replace(seen=seen.seen, nonfinite=seen.nonfinite)
        after = self.joining(statistic.fold)(ready, summary)
        # Nothing but the counters may move for a group whose part of the batch is empty.
        empty_part = ~is_positive(summary.seen)
        kept = jax.tree.map(lambda old, new: jnp.where(_trailing(empty_part, new.ndim), old, new), state, after)
        return kept._replace(nonfinite=after.nonfinite)

    @functools.partial(jax.jit, static_argnums=0)
    def _merge(self, a: State, b: State) -> State:
        """The state of two streams; axes in front of those of the groups are layers stacked by a scan."""
        assert self.statistic.merge is not None
        merge = self.joining(self.statistic.merge)
        for _ in range(len(a.seen.shape) - self.spec.rank):
            merge = jax.vmap(merge)
        return merge(a, b)

    @functools.partial(jax.jit, static_argnums=0)
    def _qparams(self, state: State) -> tuple[jax.Array, jax.Array]:
        """Scale and zero point; axes in front of those of the groups are layers stacked by a scan, and no matter."""

        def bounds(state: State) -> tuple[jax.Array, jax.Array]:
            if self.range_rule is None or self.statistic.bins is None:
                return self.statistic.bounds(state, self.spec)
            return self.range_rule(*self.statistic.bins(state), state.min_val, state.max_val, self.spec)

        seen = is_calibrated(state)
        flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[seen.ndim :]), state)
        # In blocks, since a search over all channels at once would hold all its candidates at once.
        ends = jax.lax.map(bounds, flat, batch_size=BLOCK) if seen.ndim else bounds(state)
        ends = (end.reshape(seen.shape) for end in ends)
        # Unseen groups keep sentinels: 0..0 gives them the scale eps. A sum that overflowed still names a finite range.
        min_val, max_val = (jnp.where(seen, jnp.clip(end, -_LARGEST, _LARGEST), 0.0) for end in ends)
        scale, zero_point = map_range(min_val, max_val, self.spec)
        return jnp.where(jnp.any(seen), scale, 1.0), jnp.where(jnp.any(seen), zero_point, 0)

    def joining(self, combine: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """The statistic's `reduce`, `fold` or `merge`, over all groups, with the counters added."""

        def join(a: Any, b: Any) -> Any:
            joined = self.spec.vmap(combine)(a, b)
            return joined._replace(seen=add(a.seen, b.seen), nonfinite=add(a.nonfinite, b.nonfinite))

        return join


def _check_real(dtype: Any) -> None:
    if not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_):
        raise ValueError(f"x must hold real numbers; got {dtype}")


def _checked_mask(mask: Any, shape: tuple[int, ...]) -> Any:
    fits = len(mask.shape) == len(shape) and all(m in (1, n) for m, n in zip(mask.shape, shape, strict=True))
    if not fits:
        raise ValueError(
            f"mask must have the rank of x, each axis of its size or of size 1; got mask {mask.shape} for x {shape}. "
            "Add the missing axes where they belong: mask[..., None] for (batch, time) on (batch, time, features)"
        )
    return mask


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
