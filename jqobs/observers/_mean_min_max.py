"""The mean over batches of the extremes of each batch."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jqobs.formats.qdtype import QDtype, quint8
from jqobs.formats.qscheme import QScheme, per_tensor_affine
from jqobs.formats.quant_spec import QuantSpec
from jqobs.numerics import counting
from jqobs.numerics.arithmetic import interpolate, opaque
from jqobs.numerics.counting import Count, count
from jqobs.observers import _min_max
from jqobs.observers._min_max import MinMaxState
from jqobs.observers.lifting import lift
from jqobs.observers.observer import Observer
from jqobs.observers.statistic import Statistic
from jqobs.recipe import factory


class MeanMinMaxState(NamedTuple):
    """The state of `mean_min_max`."""

    min_val: jax.Array  # [*groups] float32, the mean of the minima of the batches; +inf before any data
    max_val: jax.Array  # [*groups] float32, the mean of the maxima of the batches; -inf before any data
    batches: Count  # [*groups] batches with data
    seen: Count  # [*groups] finite values folded in
    nonfinite: Count  # [*groups] NaN and infinities ignored


@factory
def mean_min_max(
    *,
    qscheme: QScheme = per_tensor_affine,
    qdtype: QDtype = quint8,
    ch_axis: int | None = None,
    group_size: int | None = None,
    eps: float | None = None,
) -> Observer:
    """Tracks the mean of the minimum and of the maximum of a batch, over batches.

    A crude protection against outliers, kept because other JAX quantizers calibrate this way and can be compared with.
    **The unit is the batch**: the result depends on how the data was cut into batches (not on their order, but for the
    rounding of a float sum). A batch that is spread over devices is reduced first (`axis_name`).

    Args:
      qscheme: The scheme of the grid; a per-channel one asks for a state per channel.
      qdtype: The type of the codes.
      ch_axis: The channel axis of the data; None leaves it to be bound later.
      group_size: How many values of a channel share a scale; None for all.
      eps: A floor under the scale; None for the grid's own.

    Returns:
      An observer with `MeanMinMaxState`, mergeable.

    Raises:
      ValueError: Arguments of another type, or that contradict one another.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> observer = jqobs.mean_min_max()
      >>> state = observer.init(jnp.zeros(2))
      >>> for batch in (jnp.array([0.0, 1.0]), jnp.array([0.0, 5.0])):
      ...     state = observer.update(state, batch)
      >>> state.max_val.item()
      3.0

    References:
      `absmax`/`minmax` calibration of Qwix, github.com/google/qwix.
    """
    return lift(STATISTIC, qscheme=qscheme, qdtype=qdtype, ch_axis=ch_axis, group_size=group_size, eps=eps)


def init() -> MeanMinMaxState:
    """Nothing seen."""
    return MeanMinMaxState(*_min_max.init()[:2], batches=count(), seen=count(), nonfinite=count())


def fold(state: MeanMinMaxState, batch: MinMaxState) -> MeanMinMaxState:
    """One batch more, in a form that neither overflows nor loses small batches beside a large sum."""
    batches = counting.add(state.batches, count(1))
    share = 1 / counting.to_float(batches)
    first = ~counting.is_positive(state.batches)

    def mean(old: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.where(first, new, interpolate(old, new, share))

    min_val, max_val = mean(state.min_val, batch.min_val), mean(state.max_val, batch.max_val)
    return state._replace(min_val=min_val, max_val=max_val, batches=batches)


def merge(a: MeanMinMaxState, b: MeanMinMaxState) -> MeanMinMaxState:
    """The means over the batches of both."""
    batches = counting.add(a.batches, b.batches)
    all_batches = counting.to_float(batches)

    def share(state: MeanMinMaxState, mean: jax.Array) -> jax.Array:
        part = counting.to_float(state.batches) / all_batches
        # Hidden, so that the two products are rounded alike and the order does not matter.
        return jnp.where(counting.is_positive(state.batches), opaque(mean * part, behind=part), 0.0)

    def mean(of_a: jax.Array, of_b: jax.Array) -> jax.Array:
        return jnp.where(counting.is_positive(batches), share(a, of_a) + share(b, of_b), of_a)

    return a._replace(min_val=mean(a.min_val, b.min_val), max_val=mean(a.max_val, b.max_val), batches=batches)


def bounds(state: MeanMinMaxState, spec: QuantSpec) -> tuple[jax.Array, jax.Array]:
    """The mean range, on any grid."""
    del spec
    return state.min_val, state.max_val


STATISTIC = Statistic(
    name="mean_min_max",
    init=init,
    summarize=_min_max.summarize,
    reduce=_min_max.merge,
    fold=fold,
    merge=merge,
    bounds=bounds,
)
