"""The calibration loop: jitted, donated, with no value read on the host until it is over."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jqobs.observers.lifting import as_values
from jqobs.observers.merging import check_merges, merge_stacked
from jqobs.observers.observer import Observer, State
from jqobs.reporting.progress import progress_bar
from jqobs.sharding.placement import on_each_device, replicate, shard_arguments, with_automatic_axes
from jqobs.storage.checkpoint import load, save
from jqobs.tracing.arguments import Arguments, as_arguments


def calibrate(
    step: Any,
    batches: Iterable[Any],
    *,
    state: State = None,
    progress: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
    merge_at_end: bool = False,
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
      checkpoint: A path to save to (extra `checkpoint`). If there is a file, the run that wrote it is taken up: called
        again with the same arguments, after it was killed at any moment, it ends with the bits of an uninterrupted run.
        A finished run leaves its last state there, and called again returns it.
      checkpoint_every: After how many batches to save; None for only at the end.
      mesh: Devices to spread every batch over. What `step` calls parameters is copied to all of them, every other array
        is split on its leading axis. A batch that does not divide is not padded: it runs on all devices alike.
      merge_at_end: Whether each device of the mesh keeps a state of its own, merged once at the end: then no step has a
        collective at all. The unit of `mean_min_max` is then the part of a batch that a device gets, and what all
        devices hold, such as weights, is counted once for each.

    Returns:
      The state after the last batch.

    Raises:
      ValueError: No batches (such as a generator that was used up before), a function without a state, or one that does
        not return `(out, state)`; `merge_at_end` without a mesh, or of an observer that cannot be merged; a checkpoint
        of more batches than there are, or of another calibration.
      Exception: Whatever a batch, its update or a checkpoint raises, with the state so far as its attribute `state`.
        (Not if a compiled step fails while it runs: it holds the state then.)

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> observer = jqobs.min_max()
      >>> state = jqobs.calibrate(observer, [jnp.array([-1.0, 0.0]), jnp.array([2.0, 3.0])])
      >>> state.min_val.item(), state.max_val.item()
      (-1.0, 3.0)
    """
    loop = _loop_of(step, mesh, merge_at_end)
    if state is None and not loop.begins:
        raise ValueError(f"state must be given where step is a function: nothing says how to make one for {step!r}")
    if checkpoint_every is not None and (
        isinstance(checkpoint_every, bool) or not isinstance(checkpoint_every, int) or checkpoint_every < 1
    ):
        raise ValueError(f"checkpoint_every must be a whole number of batches, at least 1; got {checkpoint_every!r}")
    if checkpoint_every is not None and checkpoint is None:
        raise ValueError(f"checkpoint_every={checkpoint_every} needs checkpoint=, a path to save to")
    resumes = checkpoint if checkpoint is not None and os.path.lexists(checkpoint) else None
    running, done, saved = None, 0, 0

    def keep() -> int:
        assert checkpoint is not None
        save(checkpoint, {"state": running, "done": np.uint32(done)})
        return done

    try:
        for batch in progress_bar(batches, "calibrate", progress=progress):
            arguments = as_arguments(batch)
            if running is None:
                running = loop.begin(state, *arguments)
                if running is not None and resumes is not None:
                    read = load(resumes, {"state": running, "done": np.uint32(0)})
                    running, saved = loop.place(read["state"]), int(read["done"])
            if running is not None and done >= saved:
                running = loop.advance(running, *arguments)
            done += 1
            if running is not None and checkpoint_every is not None and done > saved and done % checkpoint_every == 0:
                saved = keep()
        if done < saved:
            raise ValueError(
                f"batches hold {done} batches, and {checkpoint} was saved after {saved}: not the same ones"
            )
        if running is not None and checkpoint is not None and done > saved:
            saved = keep()
    except BaseException as error:
        _keep(error, loop, running, max(done, saved))
        raise
    if running is None or not done:
        raise ValueError(
            f"batches must hold at least one batch with data; got {done} batches from {batches!r}. "
            "Was a generator used up before?"
        )
    return loop.finish(running)


class _Loop(NamedTuple):
    """What a loop does: how it begins, goes on and ends. Between, its state may be more than one state."""

    begins: bool  # Whether it can begin without a state.
    begin: Callable[..., Any]  # (state or None, *arguments) -> running; None if the arguments do not say enough.
    place: Callable[[Any], Any]  # (running) -> running, where it belongs; after it was loaded.
    advance: Callable[..., Any]  # (running, *arguments) -> running
    finish: Callable[[Any], State]  # (running) -> state


def _loop_of(step: Any, mesh: jax.sharding.Mesh | None, merge_at_end: bool) -> _Loop:
    init, advance = _parts(step)

    def begin(state: State, *arguments: Any) -> State:
        # The first donation must not take the caller's buffers.
        return init(*arguments) if state is None else jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), state)

    alone = _Loop(init is not None, begin, lambda running: running, advance, lambda running: running)
    if mesh is None:
        if merge_at_end:
            raise ValueError("merge_at_end=True needs mesh=: without one there is a single state")
        return alone
    if not isinstance(mesh, jax.sharding.Mesh):
        raise ValueError(f"mesh must be a jax.sharding.Mesh, such as jax.make_mesh((8,), ('data',)); got {mesh!r}")
    mesh = with_automatic_axes(mesh)
    parameters = getattr(step, "find_parameters", lambda *arguments: jax.tree.map(lambda leaf: False, arguments))
    if not merge_at_end:

        def place(running: State) -> State:
            return replicate(mesh, running)

        return alone._replace(
            begin=lambda state, *arguments: place(begin(state, *arguments)),
            place=place,
            advance=lambda running, *arguments: advance(
                running, *shard_arguments(mesh, arguments, parameters(*arguments)).arguments
            ),
        )
    if init is None:
        raise ValueError(f"merge_at_end=True needs an Observer or a calibration, that says how to merge; got {step!r}")
    check_merges("merge_at_end=True", step)
    return _deferred(step, mesh, alone, parameters)


def _deferred(step: Any, mesh: jax.sharding.Mesh, alone: _Loop, parameters: Callable[..., Any]) -> _Loop:
    """A state for each device along a leading axis, and one more for all batches that do not divide."""
    own = jax.sharding.NamedSharding(mesh, jax.P(mesh.axis_names))
    update = _update_of(step)

    def place(running: Any) -> Any:
        return {"each": jax.device_put(running["each"], own), "rest": replicate(mesh, running["rest"])}

    def begin(state: State, *arguments: Any) -> Any:
        empty = alone.begin(None, *arguments)
        if empty is None:
            return None
        states = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (mesh.size, *leaf.shape)), empty)
        return place({"each": states, "rest": empty if state is None else alone.begin(state, *arguments)})

    advance_each = jax.jit(functools.partial(on_each_device, update, mesh), static_argnums=1, donate_argnums=0)

    def advance(running: Any, *arguments: Any) -> Any:
        spread = shard_arguments(mesh, arguments, parameters(*arguments))
        if spread.is_split:
            return {**running, "each": advance_each(running["each"], spread.specs, spread.arguments)}
        return {**running, "rest": alone.advance(running["rest"], *spread.arguments)}

    def finish(running: Any) -> State:
        running = jax.device_get(running)
        return step.merge(merge_stacked(step, running["each"]), running["rest"])

    return _Loop(True, begin, place, advance, finish)


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


def _update_of(step: Any) -> Callable[..., State]:
    if isinstance(step, Observer):
        return lambda state, x, mask=None: step.update(state, x, mask=mask)
    return lambda state, *arguments: step.update(state, *arguments)[1]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _update(observer: Observer, state: State, x: jax.Array, mask: Any) -> State:
    return observer.update(state, x, mask=mask)


def _compiled(step: Callable[..., Any]) -> Callable[..., State]:
    """Compiled anew for every calibration: what a function closes over may have changed since the last."""

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def advance(form: Arguments, state: State, arrays: list[Any]) -> State:
        result = step(state, *form.restore(arrays)[0])
        pair = isinstance(result, tuple) and len(result) == 2 and not hasattr(result, "_fields")
        if not pair or jax.tree.structure(result[1]) != jax.tree.structure(state):
            raise ValueError(
                f"step must return (out, state), with a state like the one it was given, "
                f"{jax.tree.structure(state)}; it returned {jax.tree.structure(result)}"
            )
        return result[1]

    def run(state: State, *arguments: Any) -> State:
        form, arrays = Arguments.split(arguments, {})
        return advance(form, state, arrays)

    return run


def _keep(error: BaseException, loop: _Loop, running: Any, done: int) -> None:
    """Hands what was collected over with the error."""
    if running is None or not done:
        error.add_note(f"calibrate: failed in batch {done + 1}, before anything was collected")
    elif any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(running)):
        error.add_note(f"calibrate: failed in batch {done + 1}, while it held the state")
    else:
        error.state = loop.finish(running)  # pyright: ignore[reportAttributeAccessIssue]
        error.add_note(f"calibrate: the {done} batches before are not lost; their state is `error.state`")
