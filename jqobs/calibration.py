"""The calibration loop: jitted, donated, with no value read on the host until it is over."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jqobs.models.observation import Calibration
from jqobs.numerics.inputs import as_array, described, owned
from jqobs.observers.merging import check_merges, merge_stacked
from jqobs.observers.observer import Observer
from jqobs.observers.statistic import State
from jqobs.reporting.progress import progress_bar
from jqobs.sharding.placement import Spread, on_each_device, replicate, shard_arguments, with_automatic_axes
from jqobs.storage.checkpoint import load, save
from jqobs.tracing.arguments import as_arguments
from jqobs.tracing.compilation import compiled


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
    adapted = as_step(step)
    loop = _loop_for(adapted, mesh, merge_at_end, step)
    if state is None and type(adapted) is _FunctionStep:
        adapted.init()
    if checkpoint_every is not None and (type(checkpoint_every) is not int or checkpoint_every < 1):
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
            raise ValueError(f"batches hold {done} batches, and {checkpoint} was saved after {saved}: these are others")
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


class Step(Protocol):
    """What the loop asks of what it runs; an Observer, a calibration and a function are adapted to it below."""

    @property
    def merge(self) -> Callable[[State, State], State] | None:
        """`(state, state) -> state`, or None where nothing says how to merge."""

    def init(self, *arguments: Any) -> State | None:
        """The first state; None if these arguments do not say enough, as an empty batch."""

    def update(self, state: State, *arguments: Any) -> State:
        """The state after a batch, inside a program that is traced."""

    def advance(self, state: State, *arguments: Any) -> State:
        """The same as one compiled call, to which the state is given up."""

    def find_weights(self, *arguments: Any) -> Any:
        """A tree of flags like the arguments: what is on all devices of a mesh alike."""


def as_step(step: Any) -> Step:
    """What was given to `calibrate`, as the loop takes it.

    Raises:
      ValueError: It is no Observer, no calibration and no function.

    Example:
      >>> import jqobs
      >>> from jqobs.calibration import as_step
      >>> as_step(3)
      Traceback (most recent call last):
      ValueError: step must be an Observer, a calibration or a function; got 3
    """
    if isinstance(step, Observer):
        return _ObserverStep(step)
    if isinstance(step, Calibration):
        return _CalibrationStep(step)
    if callable(step):
        return _FunctionStep(step)
    raise ValueError(f"step must be an Observer, a calibration or a function; got {step!r}")


class _ObserverStep:
    """A batch is `(x, mask)` or `x`."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self.merge = observer.merge

    def init(self, *arguments: Any) -> State | None:
        x = described(_pair(*arguments)[0])
        return self.observer.init(x) if math.prod(x.shape) else None

    def update(self, state: State, *arguments: Any) -> State:
        x, mask = _pair(*arguments)
        return self.observer.update(state, x, mask=mask)

    def advance(self, state: State, *arguments: Any) -> State:
        x, mask = _pair(*arguments)
        return _update(self.observer, state, as_array(x), None if mask is None else owned(mask, "mask"))

    def find_weights(self, *arguments: Any) -> Any:
        return jax.tree.map(lambda leaf: False, arguments)


def _pair(x: Any, mask: Any = None, *more: Any) -> tuple[Any, Any]:
    if more:
        raise ValueError(f"batches must hold x or (x, mask) for an observer; got a tuple of {2 + len(more)}")
    return x, mask


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _update(observer: Observer, state: State, x: jax.Array, mask: Any) -> State:
    return observer.update(state, x, mask=mask)


class _FunctionStep:
    """A function `(state, *batch) -> (out, state)`: nothing says how its state begins, or is merged."""

    merge: Callable[[State, State], State] | None = None

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        # Compiled anew for every calibration: what a function closes over may have changed since the last.
        self._compiled = compiled(lambda state, args, kwargs: self.update(state, *args), donates=True)

    def init(self, *arguments: Any) -> State | None:
        raise ValueError(
            f"state must be given where step is a function: {self.function!r} does not say how to make one"
        )

    def update(self, state: State, *arguments: Any) -> State:
        result = self.function(state, *arguments)
        pair = isinstance(result, tuple) and len(result) == 2 and not hasattr(result, "_fields")
        if not pair or jax.tree.structure(result[1]) != jax.tree.structure(state):
            raise ValueError(
                f"step must return (out, state), with a state like the one it was given, "
                f"{jax.tree.structure(state)}; it returned {jax.tree.structure(result)}"
            )
        return result[1]

    def advance(self, state: State, *arguments: Any) -> State:
        return self._compiled(state, arguments, {})

    def find_weights(self, *arguments: Any) -> Any:
        return jax.tree.map(lambda leaf: False, arguments)


class _CalibrationStep(_FunctionStep):
    """A batch holds the arguments of the function that is observed."""

    def __init__(self, calibration: Calibration) -> None:
        super().__init__(calibration.update)
        self.calibration = calibration
        self.merge = calibration.merge

    def init(self, *arguments: Any) -> State | None:
        return self.calibration.init(*arguments)

    def find_weights(self, *arguments: Any) -> Any:
        return self.calibration.find_parameters(*arguments)


class _Alone:
    """The loop on one device: what runs between two batches is the state."""

    def __init__(self, step: Step) -> None:
        self.step = step

    def begin(self, state: State | None, *arguments: Any) -> Any:
        """What runs at first; None if the arguments do not say enough."""
        if state is None:
            return self.step.init(*arguments)
        # The first donation must not take the caller's buffers.
        return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), state)

    def place(self, running: Any) -> Any:
        """The same where it belongs, after it was loaded."""
        return running

    def advance(self, running: Any, *arguments: Any) -> Any:
        """After a batch."""
        return self.step.advance(running, *arguments)

    def finish(self, running: Any) -> State:
        """The state that it stands for."""
        return running


class _OnMesh(_Alone):
    """The loop on a mesh: every batch is spread over it, and the state lies on all of it."""

    def __init__(self, step: Step, mesh: jax.sharding.Mesh) -> None:
        super().__init__(step)
        self.mesh = mesh

    def begin(self, state: State | None, *arguments: Any) -> Any:
        running = super().begin(state, *arguments)
        return None if running is None else self.place(running)

    def place(self, running: Any) -> Any:
        return replicate(self.mesh, running)

    def shard(self, arguments: Any) -> Spread:
        return shard_arguments(self.mesh, arguments, self.step.find_weights(*arguments))

    def advance(self, running: Any, *arguments: Any) -> Any:
        return super().advance(running, *self.shard(arguments).arguments)


class _OnEachDevice(_OnMesh):
    """The loop with a state for each device along a leading axis, and one more for all batches that do not divide."""

    def __init__(self, step: Step, mesh: jax.sharding.Mesh) -> None:
        super().__init__(step, mesh)
        update = functools.partial(on_each_device, step.update, mesh)
        self._advance_each = jax.jit(update, static_argnums=1, donate_argnums=0)

    def begin(self, state: State | None, *arguments: Any) -> Any:
        empty = self.step.init(*arguments)
        if empty is None:
            return None
        assert self.step.merge is not None
        jax.eval_shape(self.step.merge, empty, empty)  # What cannot be merged is said now, and not at the end.
        states = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (self.mesh.size, *leaf.shape)), empty)
        return self.place({"each": states, "rest": empty if state is None else _Alone.begin(self, state)})

    def place(self, running: Any) -> Any:
        own = jax.sharding.NamedSharding(self.mesh, jax.P(self.mesh.axis_names))
        return {"each": jax.device_put(running["each"], own), "rest": replicate(self.mesh, running["rest"])}

    def advance(self, running: Any, *arguments: Any) -> Any:
        spread = self.shard(arguments)
        if spread.is_split:
            return {**running, "each": self._advance_each(running["each"], spread.specs, spread.arguments)}
        return {**running, "rest": self.step.advance(running["rest"], *spread.arguments)}

    def finish(self, running: Any) -> State:
        assert self.step.merge is not None
        running = jax.device_get(running)
        return self.step.merge(merge_stacked(self.step, running["each"]), running["rest"])


def _loop_for(step: Step, mesh: jax.sharding.Mesh | None, merge_at_end: bool, given: Any) -> _Alone:
    if mesh is None:
        if merge_at_end:
            raise ValueError("merge_at_end=True needs mesh=: without one there is a single state")
        return _Alone(step)
    if not isinstance(mesh, jax.sharding.Mesh):
        raise ValueError(f"mesh must be a jax.sharding.Mesh, such as jax.make_mesh((8,), ('data',)); got {mesh!r}")
    mesh = with_automatic_axes(mesh)
    if not merge_at_end:
        return _OnMesh(step, mesh)
    if type(step) is _FunctionStep:
        raise ValueError(f"merge_at_end=True needs an Observer or a calibration, that says how to merge; got {given!r}")
    check_merges("merge_at_end=True", given)
    return _OnEachDevice(step, mesh)


def _keep(error: BaseException, loop: _Alone, running: Any, done: int) -> None:
    """Hands what was collected over with the error."""
    if running is None or not done:
        error.add_note(f"calibrate: failed in batch {done + 1}, before anything was collected")
    elif any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(running)):
        error.add_note(f"calibrate: failed in batch {done + 1}, while it held the state")
    else:
        error.state = loop.finish(running)  # pyright: ignore[reportAttributeAccessIssue]
        error.add_note(f"calibrate: the {done} batches before are not lost; their state is `error.state`")
