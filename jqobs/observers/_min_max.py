"""Running extremes: the smallest and the largest value ever seen."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jqobs.formats.qdtype import QDtype, quint8
from jqobs.formats.qscheme import QScheme, per_tensor_affine
from jqobs.formats.quant_spec import QuantSpec
from jqobs.numerics.counting import Count, count
from jqobs.observers.lifting import lift
from jqobs.observers.observer import Observer
from jqobs.observers.statistic import Chunk, Statistic
from jqobs.recipe import factory


class MinMaxState(NamedTuple):
    """The state of `min_max`."""

    min_val: jax.Array  # [*groups] float32, +inf before any data: one-sided data has no 0 in it
    max_val: jax.Array  # [*groups] float32, -inf before any data
    seen: Count  # [*groups] finite values folded in
    nonfinite: Count  # [*groups] NaN and infinities ignored


@factory
def min_max(
    *,
    qscheme: QScheme = per_tensor_affine,
    qdtype: QDtype = quint8,
    ch_axis: int | None = None,
    group_size: int | None = None,
    eps: float | None = None,
) -> Observer:
    """Tracks the running minimum and maximum.

    The right choice for weights, and for activations of a few bits more than they need: no value is ever clipped, and
    so one outlier widens every step of the grid. The result depends on neither order, batching nor sharding.

    Args:
      qscheme: The scheme of the grid; a per-channel one asks for a state per channel.
      qdtype: The type of the codes.
      ch_axis: The channel axis of the data; None leaves it to be bound later.
      group_size: How many values of a channel share a scale; None for all.
      eps: A floor under the scale; None for the grid's own.

    Returns:
      An observer with `MinMaxState`, mergeable.

    Raises:
      ValueError: Arguments of another type, or that contradict one another.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> observer = jqobs.min_max(qscheme=jqobs.per_channel_symmetric, qdtype=jqobs.qint8, ch_axis=1)
      >>> x = jnp.array([[1.0, -2.0, 3.0], [4.0, 5.0, -6.0]])
      >>> state = observer.update(observer.init(x), x)
      >>> state.min_val.tolist(), state.max_val.tolist()
      ([1.0, -2.0, -6.0], [4.0, 5.0, 3.0])

    References:
      `torch.ao.quantization.observer.MinMaxObserver` and `PerChannelMinMaxObserver`.
    """
    return lift(STATISTIC, qscheme=qscheme, qdtype=qdtype, ch_axis=ch_axis, group_size=group_size, eps=eps)


def init() -> MinMaxState:
    """Nothing seen."""
    return MinMaxState(min_val=jnp.float32(jnp.inf), max_val=jnp.float32(-jnp.inf), seen=count(), nonfinite=count())


def summarize(chunk: Chunk, state: object) -> MinMaxState:
    """The extremes of one batch."""
    del state
    return init()._replace(min_val=chunk.min_val, max_val=chunk.max_val)


def merge(a: MinMaxState, b: MinMaxState) -> MinMaxState:
    """The extremes of both."""
    return a._replace(min_val=jnp.minimum(a.min_val, b.min_val), max_val=jnp.maximum(a.max_val, b.max_val))


def bounds(state: MinMaxState, spec: QuantSpec) -> tuple[jax.Array, jax.Array]:
    """The full range, on any grid."""
    del spec
    return state.min_val, state.max_val


STATISTIC = Statistic(
    name="min_max", init=init, summarize=summarize, reduce=merge, fold=merge, merge=merge, bounds=bounds
)
