"""One state from many: from the devices of a mapped axis, and from the processes of a cluster."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax
import numpy as np

from jqobs.observers.observer import Observer, State
from jqobs.sharding.array_types import reduce_across, reduce_leading


def merge_across(observer: Any, state: State, axis_name: Hashable) -> State:
    """Merges the states that the devices of a mapped axis hold, inside `jax.shard_map` or `jax.vmap`.

    Each device has to have begun with `observer.init`: a state that already held data when it was handed to all of them
    would be counted once for each. The states are gathered and merged in a tree, so that the result is exact wherever
    the merge is, and may leave a `shard_map` that checks replication under `out_specs=P()`.

    Args:
      observer: An Observer, or a calibration made by `jqobs.observe`.
      state: Its state on this device.
      axis_name: The axis, or several.

    Returns:
      The state of all the data, the same on every device.

    Raises:
      ValueError: The observer has no merge: its result depends on the order of batches.

    Example:
      >>> import jax, jax.numpy as jnp, jqobs
      >>> observer, x = jqobs.min_max(), jnp.array([[1.0, 2.0], [-3.0, 0.0]])
      >>> def on_each(x):
      ...     return jqobs.merge_across(observer, observer.update(observer.init(x), x), "device")
      >>> jax.vmap(on_each, axis_name="device")(x).min_val.tolist()
      [-3.0, -3.0]
    """
    check_merges("merge_across", observer)
    return reduce_across(observer.merge, state, axis_name)


def merge_processes(observer: Any, state: State) -> State:
    """Merges the states of all processes that were started with `jax.distributed.initialize`; each gets the whole.

    Each process calibrates on batches of its own and calls this once at the end, all of them at the same place.

    Args:
      observer: An Observer, or a calibration made by `jqobs.observe`.
      state: Its state in this process, on its own devices.

    Returns:
      The state of all the data, the same bits in every process. With one process, the state.

    Raises:
      ValueError: The observer has no merge: its result depends on the order of batches.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> observer, x = jqobs.min_max(), jnp.array([-3.0, 0.0])
      >>> jqobs.merge_processes(observer, observer.update(observer.init(x), x)).min_val.item()
      -3.0
    """
    check_merges("merge_processes", observer)
    if jax.process_count() == 1:
        return state
    from jax.experimental import multihost_utils

    gathered = multihost_utils.process_allgather(jax.device_get(state))
    return merge_stacked(observer, gathered)


def merge_stacked(observer: Any, states: State) -> State:
    """Merges the states that lie along the leading axis of every leaf, on the host's own device.

    Example:
      >>> import jax, jax.numpy as jnp, jqobs
      >>> from jqobs.observers.merging import merge_stacked
      >>> observer = jqobs.min_max()
      >>> states = jax.vmap(lambda x: observer.update(observer.init(x), x))(jnp.array([[1.0], [2.0]]))
      >>> merge_stacked(observer, states).max_val.item()
      2.0
    """
    return reduce_leading(observer.merge, jax.tree.map(np.asarray, states))


def check_merges(what: str, observer: Any) -> None:
    """Raises ValueError for an observer, or a calibration with one, whose result depends on the order of batches.

    Example:
      >>> import jqobs
      >>> from jqobs.observers.merging import check_merges
      >>> check_merges("merge_across", jqobs.moving_average_min_max())
      Traceback (most recent call last):
      ValueError: merge_across cannot merge moving_average_min_max(): its result depends on the order of batches, ...
    """
    if isinstance(observer, Observer) and observer.merge is None:
        raise ValueError(
            f"{what} cannot merge {observer!r}: its result depends on the order of batches, which states of separate "
            "streams no longer tell. Reduce each batch across devices first: update(..., axis_name=...) inside a "
            "mapped function, or jax.jit on arrays that are sharded over all devices"
        )
    if not callable(getattr(observer, "merge", None)):
        raise ValueError(f"observer must be an Observer or a calibration; got {observer!r}")
