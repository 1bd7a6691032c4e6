"""An observer for tensors that stay in float: nothing is watched, and there is nothing to answer."""

from __future__ import annotations

from typing import NoReturn

from jqobs.observers.observer import NoQParamsError, Observer, stateless
from jqobs.recipe import factory


@factory
def noop() -> Observer:
    """Watches nothing, and has no grid: leaves a tensor in float where an observer is asked for.

    Returns:
      An observer without state. Its `calculate_qparams` raises `RuntimeError`.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> observer = jqobs.noop()
      >>> observer.update(observer.init(jnp.zeros(3)), jnp.ones(3))
      NoState()

    References:
      `torch.ao.quantization.observer.NoopObserver`.
    """

    def calculate_qparams() -> NoReturn:
        raise NoQParamsError("noop watches no data and leaves its tensor in float, so it has no scale or zero point")

    return stateless(calculate_qparams)
