"""What `FakeQuantize` does, as pure functions: the layers of `jqobs.linen` and `jqobs.nnx` only keep what these return.

Beside the state of the observer there is the grid that was last read off it, so that nothing is searched while a model
runs, and two switches, which are arrays, so that switching compiles nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jqobs.meshes import vary_like
from jqobs.observer import Observer, State, is_calibrated
from jqobs.qparams import QParams
from jqobs.quantization import fake_quantize


class Held(NamedTuple):
    """The grid that is used until it is refreshed."""

    scale: jax.Array  # [*groups] float32
    zero_point: jax.Array  # [*groups] int32
    is_known: jax.Array  # [] bool: whether it rests on data; else there is nothing to round to


class Switches(NamedTuple):
    """What a layer does when it is called."""

    observer_enabled: jax.Array  # [] bool
    fake_quant_enabled: jax.Array  # [] bool

    @classmethod
    def on(cls) -> Switches:
        """Both on, each with a buffer of its own: leaves that share one cannot be donated."""
        return cls(*(jnp.array(True) for _ in cls._fields))


def switched(switches: Switches, **enabled: bool) -> Switches:
    """The switches with some of them set, each of the shape that it had.

    Example:
      >>> from jqobs.fake_quantizer import Switches, switched
      >>> switched(Switches.on(), observer_enabled=False).observer_enabled.item()
      False
    """
    return switches._replace(**{name: jnp.full_like(getattr(switches, name), on) for name, on in enabled.items()})


@functools.partial(jax.jit, static_argnums=0)
def refresh(observer: Observer, state: State) -> Held:
    """The grid for what was seen. An observer with a range rule searches for it.

    Example:
      >>> import jqobs
      >>> from jqobs.fake_quantizer import refresh
      >>> observer = jqobs.fixed_qparams(scale=0.5, zero_point=3)
      >>> held = refresh(observer, observer.init(0.0))
      >>> float(held.scale), bool(held.is_known)
      (0.5, True)
    """
    scale, zero_point = observer.calculate_qparams(state)
    is_known = jnp.any(is_calibrated(state))
    return Held(jnp.asarray(scale), jnp.asarray(zero_point), is_known)


def searches(observer: Observer) -> bool:
    """Whether reading a grid is a search, which has no place in a step of training.

    Example:
      >>> import jqobs
      >>> from jqobs.fake_quantizer import searches
      >>> searches(jqobs.min_max()), searches(jqobs.log_histogram())
      (False, True)
    """
    return observer.recipe.get("range_rule") is not None


def watch(
    observer: Observer,
    state: State,
    held: Held,
    x: Any,
    mask: Any,
    enabled: Any,
    *,
    refreshes: bool,
) -> tuple[State, Held]:
    """Shows a batch to the observer if `enabled`, and then reads its grid once if it `refreshes`."""

    def seeing(state: State, held: Held) -> tuple[State, Held]:
        after = observer.update(state, x, mask=mask)
        return after, refresh(observer, after) if refreshes else held

    if isinstance(enabled, bool):
        return seeing(state, held) if enabled else (state, held)
    state, held = vary_like((state, held), x)
    return jax.lax.cond(enabled, seeing, lambda state, held: (state, held), state, held)


def quantize(observer: Observer, held: Held, x: jax.Array, enabled: Any) -> jax.Array:
    """Rounds `x` to the grid if `enabled` and if there is one; the gradient is straight-through."""
    if enabled is False:
        return x
    # Of the answer only what is static: the type, the scheme, the axis.
    form: QParams = jax.eval_shape(observer.calculate_qparams, jax.eval_shape(observer.init, x))
    qparams = dataclasses.replace(form, scale=held.scale, zero_point=held.zero_point)
    return jnp.where(held.is_known & enabled, fake_quantize(x, qparams), x)
