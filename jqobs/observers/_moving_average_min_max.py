"""Exponential moving averages of the extremes of each batch."""

from __future__ import annotations

import numbers
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jqobs.formats.qdtype import QDtype, quint8
from jqobs.formats.qscheme import QScheme, per_tensor_affine
from jqobs.formats.quant_spec import QuantSpec
from jqobs.numerics.arithmetic import interpolate
from jqobs.numerics.counting import Count, is_positive
from jqobs.observers import _min_max
from jqobs.observers._min_max import MinMaxState
from jqobs.observers.lifting import lift
from jqobs.observers.observer import Observer
from jqobs.observers.statistic import Statistic
from jqobs.recipe import factory


class MovingAverageMinMaxState(NamedTuple):
    """The state of `moving_average_min_max`."""

    min_val: jax.Array  # [*groups] float32, the average of the minima; +inf before any data
    max_val: jax.Array  # [*groups] float32, the average of the maxima; -inf before any data
    seen: Count  # [*groups] finite values folded in
    nonfinite: Count  # [*groups] NaN and infinities ignored


@factory
def moving_average_min_max(
    *,
    averaging_constant: float = 0.01,
    qscheme: QScheme = per_tensor_affine,
    qdtype: QDtype = quint8,
    ch_axis: int | None = None,
    group_size: int | None = None,
    eps: float | None = None,
) -> Observer:
    """Tracks moving averages of the minimum and the maximum of a batch.

    The first batch with data is taken whole, then `m += averaging_constant * (batch - m)`. The right choice inside
    training, where ranges drift and old batches should be forgotten. For calibration it is not: **the result depends on
    the order of the batches and on their size**, so two streams cannot be merged. A batch that is spread over devices
    is reduced first and averaged once (`axis_name`).

    Args:
      averaging_constant: The weight of a new batch, above 0 and at most 1, which keeps only the last batch.
      qscheme: The scheme of the grid; a per-channel one asks for a state per channel.
      qdtype: The type of the codes.
      ch_axis: The channel axis of the data; None leaves it to be bound later.
      group_size: How many values of a channel share a scale; None for all.
      eps: A floor under the scale; None for the grid's own.

    Returns:
      An observer with `MovingAverageMinMaxState`, whose `merge` is None.

    Raises:
      ValueError: `averaging_constant` out of range, or arguments that contradict one another.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> observer = jqobs.moving_average_min_max(averaging_constant=0.5)
      >>> state = observer.init(jnp.zeros(2))
      >>> for batch in (jnp.array([-2.0, 2.0]), jnp.array([-4.0, 4.0])):
      ...     state = observer.update(state, batch)
      >>> state.min_val.item(), state.max_val.item()
      (-3.0, 3.0)

    References:
      Jacob et al. (2018), section 3.1; `torch.ao.quantization.observer.MovingAverageMinMaxObserver`.
    """
    if not isinstance(averaging_constant, numbers.Real) or not 0 < averaging_constant <= 1:
        raise ValueError(f"averaging_constant must be above 0 and at most 1; got {averaging_constant!r}")

    def fold(state: MovingAverageMinMaxState, batch: MinMaxState) -> MovingAverageMinMaxState:
        started = is_positive(state.seen)

        def towards(mean: jax.Array, new: jax.Array) -> jax.Array:
            # At 1 by the argument and not by the formula: -1e8 + 1 * (-0.3 + 1e8) is 0 in float32.
            moved = new if averaging_constant == 1 else interpolate(mean, new, float(averaging_constant))
            return jnp.where(started, moved, new)

        return state._replace(
            min_val=towards(state.min_val, batch.min_val), max_val=towards(state.max_val, batch.max_val)
        )

    statistic = Statistic(
        name="moving_average_min_max",
        init=init,
        summarize=_min_max.summarize,
        reduce=_min_max.merge,
        fold=fold,
        merge=None,
        bounds=bounds,
    )
    return lift(statistic, qscheme=qscheme, qdtype=qdtype, ch_axis=ch_axis, group_size=group_size, eps=eps)


def init() -> MovingAverageMinMaxState:
    """Nothing seen."""
    return MovingAverageMinMaxState(*_min_max.init())


def bounds(state: MovingAverageMinMaxState, spec: QuantSpec) -> tuple[jax.Array, jax.Array]:
    """The averaged range, on any grid."""
    del spec
    return state.min_val, state.max_val
