"""The calibration loop: jitted, donated, with no value read on the host until it is over."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jqobs.observer import Observer, State


def calibrate(
    step: Any,
    batches: Iterable[Any],
    *,
    state: State = None,
    progress: bool = False,
) -> State:
    """Runs a calibration over batches and returns its state.

    Every step is one compiled call that donates the state to the next, so memory is constant in the number of batches
    and nothing is read back. It can be continued: `calibrate(step, more, state=state)`.

    Args:
      step: An Observer, a calibration made by `jqobs.observe`, or a function `(state, *batch) -> (out, state)`, of
        which `out` is not even computed.
      batches: The batches. A tuple is splatted into arguments (for an Observer: `(x, mask)`); anything else, a
        NamedTuple included, is the only argument.
      state: Where to continue; it is copied, not donated. A function needs one to begin with, the others make their
        own.
      progress: Whether to show a progress bar (extra `progress`).

    Returns:
      The state after the last batch.

    Raises:
      ValueError: No batches (such as a generator that was used up before), or a function without a state.
      Exception: Whatever a batch or its update raises, with the state so far as its attribute `state`.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> observer = jqobs.min_max()
      >>> state = jqobs.calibrate(observer, [jnp.array([-1.0, 0.0]), jnp.array([2.0, 3.0])])
      >>> state.min_val.item(), state.max_val.item()
      (-1.0, 3.0)
    """
    advance, init = _parts(step)
    if state is None and init is None:
        raise ValueError(f"state must be given where step is a function: nothing says how to make one for {step!r}")
    # The first donation must not take the caller's buffers.
    state = None if state is None else jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), state)
    done = 0
    try:
        for batch in _shown(batches, progress):
            arguments = batch if isinstance(batch, tuple) and not hasattr(batch, "_fields") else (batch,)
            if state is None:
                state = init(*arguments)
            state = _advance(advance, state, arguments)
            done += 1
    except BaseException as error:
        if done:
            error.state = state  # pyright: ignore[reportAttributeAccessIssue]
            error.add_note(f"calibrate: the {done} batches before are not lost; their state is `error.state`")
        raise
    if not done:
        raise ValueError(
            f"batches must hold at least one batch; got none from {batches!r}. Was a generator used up before?"
        )
    return state


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _advance(advance: Callable[..., State], state: State, arguments: tuple[Any, ...]) -> State:
    return advance(state, *arguments)


def _parts(step: Any) -> tuple[Callable[..., State], Any]:
    """How to advance a state by a batch, and how to make the first, where that is known."""
    if isinstance(step, Observer):
        return _observer_step(step), lambda x, mask=None: step.init(x)
    if hasattr(step, "update") and hasattr(step, "init"):
        return _second_result(step.update), step.init
    if callable(step):
        return _second_result(step), None
    raise ValueError(f"step must be an Observer, a calibration or a function; got {step!r}")


# Cached, so that a second calibration with the same step does not compile again.
@functools.lru_cache(maxsize=64)
def _observer_step(observer: Observer) -> Callable[..., State]:
    return lambda state, x, mask=None: observer.update(state, x, mask=mask)


@functools.lru_cache(maxsize=64)
def _second_result(step: Callable[..., tuple[Any, State]]) -> Callable[..., State]:
    return lambda state, *arguments: step(state, *arguments)[1]


def _shown(batches: Iterable[Any], progress: bool) -> Iterator[Any]:
    if not progress:
        return iter(batches)
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError("progress=True needs tqdm: pip install 'jqobs[progress]'") from error
    return iter(tqdm(batches, desc="calibrate", unit=" batches"))
