"""The calibration loop: jitted, donated, with no value read on the host until it is over."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqobs.lifting import as_values
from jqobs.observer import Observer, State
from jqobs.progress import shown


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
      ValueError: No batches (such as a generator that was used up before), a function without a state, or one that does
        not return `(out, state)`.
      Exception: Whatever a batch or its update raises, with the state so far as its attribute `state`. (Not if a
        compiled step fails while it runs: it holds the state then.)

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> observer = jqobs.min_max()
      >>> state = jqobs.calibrate(observer, [jnp.array([-1.0, 0.0]), jnp.array([2.0, 3.0])])
      >>> state.min_val.item(), state.max_val.item()
      (-1.0, 3.0)
    """
    init, advance = _parts(step)
    if state is None and init is None:
        raise ValueError(f"state must be given where step is a function: nothing says how to make one for {step!r}")
    # The first donation must not take the caller's buffers.
    state = None if state is None else jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), state)
    done = 0
    try:
        for batch in shown(batches, "calibrate", progress=progress):
            arguments = batch if isinstance(batch, tuple) and not hasattr(batch, "_fields") else (batch,)
            if state is None:
                state = init(*arguments)
            if state is not None:
                state = advance(state, *arguments)
            done += 1
    except BaseException as error:
        _keep(error, state, done)
        raise
    if state is None or not done:
        raise ValueError(
            f"batches must hold at least one batch with data; got {done} batches from {batches!r}. "
            "Was a generator used up before?"
        )
    return state


def _parts(step: Any) -> tuple[Any, Callable[..., State]]:
    """How to make the first state, where that is known, and how to advance one by a batch, compiled."""
    if isinstance(step, Observer):
        # An empty batch says nothing, not even how many channels there are.
        first = lambda x, mask=None: step.init(x) if np.size(x) else None  # noqa: E731
        return first, lambda state, x, mask=None: _update(step, state, as_values(x), mask)
    if hasattr(step, "update") and hasattr(step, "init"):
        return getattr(step, "init"), _compiled(getattr(step, "update"))  # noqa: B009 (nothing says of what type it is)
    if callable(step):
        return None, _compiled(step)
    raise ValueError(f"step must be an Observer, a calibration or a function; got {step!r}")


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _update(observer: Observer, state: State, x: jax.Array, mask: Any) -> State:
    return observer.update(state, x, mask=mask)


def _compiled(step: Callable[..., Any]) -> Callable[..., State]:
    """Compiled anew for every calibration: what a function closes over may have changed since the last."""

    def advance(state: State, *arguments: Any) -> State:
        result = step(state, *arguments)
        pair = isinstance(result, tuple) and len(result) == 2 and not hasattr(result, "_fields")
        if not pair or jax.tree.structure(result[1]) != jax.tree.structure(state):
            raise ValueError(
                f"step must return (out, state), with a state like the one it was given, "
                f"{jax.tree.structure(state)}; it returned {jax.tree.structure(result)}"
            )
        return result[1]

    return jax.jit(advance, donate_argnums=0)


def _keep(error: BaseException, state: State, done: int) -> None:
    """Hands what was collected over with the error."""
    if not done or any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
        error.add_note(f"calibrate: failed in batch {done + 1}, while it held the state")
        return
    error.state = state  # pyright: ignore[reportAttributeAccessIssue]
    error.add_note(f"calibrate: the {done} batches before are not lost; their state is `error.state`")
