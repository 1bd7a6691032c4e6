"""The mean over batches of the extremes of each batch."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jqobs import counting
from jqobs.counting import Count, count
from jqobs.lifting import lift
from jqobs.observer import Observer, Statistic, factory
from jqobs.observers import _min_max
from jqobs.observers._min_max import MinMaxState
from jqobs.qtypes import Grid, QDtype, QScheme, per_tensor_affine, quint8


class MeanMinMaxState(NamedTuple):
    """The state of `mean_min_max`."""

    sum_of_min: jax.Array  # [*groups] float32, the sum of the minima of the batches
    sum_of_max: jax.Array  # [*groups] float32, the sum of the maxima of the batches
    batches: Count  # [*groups] batches with data
    seen: Count  # [*groups] finite values folded in
    nonfinite: Count  # [*groups] NaN and infinities ignored

    @property
    def min_val(self) -> jax.Array:
        """The mean of the minima; NaN before any data."""
        return self.sum_of_min / counting.to_float(self.batches)

    @property
    def max_val(self) -> jax.Array:
        """The mean of the maxima; NaN before any data."""
        return self.sum_of_max / counting.to_float(self.batches)


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
    return MeanMinMaxState(
        sum_of_min=jnp.float32(0), sum_of_max=jnp.float32(0), batches=count(), seen=count(), nonfinite=count()
    )


def fold(state: MeanMinMaxState, batch: MinMaxState) -> MeanMinMaxState:
    """One batch more."""
    return merge(state, init()._replace(sum_of_min=batch.min_val, sum_of_max=batch.max_val, batches=count(1)))


def merge(a: MeanMinMaxState, b: MeanMinMaxState) -> MeanMinMaxState:
    """The batches of both."""
    return a._replace(
        sum_of_min=a.sum_of_min + b.sum_of_min,
        sum_of_max=a.sum_of_max + b.sum_of_max,
        batches=counting.add(a.batches, b.batches),
    )


def bounds(state: MeanMinMaxState, grid: Grid) -> tuple[jax.Array, jax.Array]:
    """The mean range, on any grid."""
    del grid
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
