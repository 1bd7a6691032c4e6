"""What `FakeQuantize` does, as pure functions: the layers of `jqobs.linen` and `jqobs.nnx` only keep what these return.

Beside the state of the observer there is the grid that was last read off it, so that nothing is searched while a model
runs, and two flags, which are arrays, so that setting one compiles nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jqobs.observers.observer import Observer, State, is_calibrated
from jqobs.quantization.qparams import QParams
from jqobs.quantization.rounding import fake_quantize
from jqobs.sharding.array_types import pvary_like


class CachedQParams(NamedTuple):
    """The grid that is used until it is read again."""

    scale: jax.Array  # [*groups] float32
    zero_point: jax.Array  # [*groups] int32
    is_calibrated: jax.Array  # [] bool: whether it rests on data; else there is nothing to round to


class FakeQuantFlags(NamedTuple):
    """What a layer does when it is called."""

    observer_enabled: jax.Array  # [] bool
    fake_quant_enabled: jax.Array  # [] bool

    @classmethod
    def on(cls) -> FakeQuantFlags:
        """Both on, each with a buffer of its own: leaves that share one cannot be donated."""
        return cls(*(jnp.array(True) for _ in cls._fields))


def with_flags(flags: FakeQuantFlags, **enabled: bool) -> FakeQuantFlags:
    """The flags with some of them set, each of the shape that it had.

    Example:
      >>> from jqobs.layers.fake_quant import FakeQuantFlags, with_flags
      >>> with_flags(FakeQuantFlags.on(), observer_enabled=False).observer_enabled.item()
      False
    """
    return flags._replace(**{name: jnp.full_like(getattr(flags, name), on) for name, on in enabled.items()})


@functools.partial(jax.jit, static_argnums=0)
def read_qparams(observer: Observer, state: State) -> CachedQParams:
    """The grid for what was seen. An observer with a range rule searches for it.

    Example:
      >>> import jqobs
      >>> from jqobs.layers.fake_quant import read_qparams
      >>> observer = jqobs.fixed_qparams(scale=0.5, zero_point=3)
      >>> cached = read_qparams(observer, observer.init(0.0))
      >>> float(cached.scale), bool(cached.is_calibrated)
      (0.5, True)
    """
    scale, zero_point = observer.calculate_qparams(state)
    return CachedQParams(jnp.asarray(scale), jnp.asarray(zero_point), jnp.any(is_calibrated(state)))


def searches(observer: Observer) -> bool:
    """Whether reading a grid is a search, which has no place in a step of training.

    Example:
      >>> import jqobs
      >>> from jqobs.layers.fake_quant import searches
      >>> searches(jqobs.min_max()), searches(jqobs.log_histogram())
      (False, True)
    """
    return observer.range_rule is not None


def observe_step(
    observer: Observer,
    state: State,
    cached: CachedQParams,
    x: Any,
    mask: Any,
    enabled: Any,
    *,
    axis_name: Hashable | None,
    update_qparams: bool,
) -> tuple[State, CachedQParams]:
    """Shows a batch to the observer if `enabled`, and then reads its grid once if it `update_qparams`."""

    def seeing(state: State, cached: CachedQParams) -> tuple[State, CachedQParams]:
        after = observer.update(state, x, mask=mask, axis_name=axis_name)
        return after, read_qparams(observer, after) if update_qparams else cached

    if isinstance(enabled, bool):
        return seeing(state, cached) if enabled else (state, cached)
    state, cached = pvary_like((state, cached), x)
    return jax.lax.cond(enabled, seeing, lambda state, cached: (state, cached), state, cached)


def apply_fake_quant(observer: Observer, cached: CachedQParams, x: jax.Array, enabled: Any) -> jax.Array:
    """Rounds `x` to the grid if `enabled` and if there is one; the gradient is straight-through."""
    if enabled is False:
        return x
    assert observer.spec is not None  # Or there would be no cached scale.
    qparams = QParams(cached.scale, cached.zero_point, observer.spec)
    return jnp.where(cached.is_calibrated & enabled, fake_quantize(x, qparams), x)
