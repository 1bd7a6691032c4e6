"""The two units of the library: an Observer, which users hold, and a Statistic, which the catalogue is written in."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import jax
import jax.numpy as jnp

from jqobs.formats.qtypes import Grid
from jqobs.numerics.counting import is_positive
from jqobs.quantization.qparams import QParams
from jqobs.recipe import Recipe

State = Any  # A NamedTuple of arrays; each statistic has its own.
P = ParamSpec("P")
Built = TypeVar("Built", bound=Any)  # A NamedTuple with the field `recipe`.


class NotCalibratedError(RuntimeError):
    """Quantization parameters were asked of a statistic that has seen no data."""


class NoQParamsError(RuntimeError):
    """Quantization parameters were asked of an observer that by design has none: a placeholder or a noop."""


class InitFn(Protocol):
    """Makes the state that stands for no data."""

    def __call__(self, x: Any) -> State:
        """Returns the empty state for data like `x`, of which only the shape and the dtype are read."""
        ...


class UpdateFn(Protocol):
    """Folds one batch into a state."""

    def __call__(self, state: State, x: Any, *, mask: Any = None, axis_name: Hashable | None = None) -> State:
        """Returns the state after the batch `x`, of which `mask` says what counts."""
        ...


class MergeFn(Protocol):
    """Joins the states of two streams."""

    def __call__(self, a: State, b: State) -> State:
        """Returns the state of the two streams together; the order does not matter."""
        ...


class CalculateQParamsFn(Protocol):
    """Reads the grid off a state."""

    def __call__(self, state: State) -> QParams:
        """Returns the scale and zero point; the state is left as it is."""
        ...


class Observer(NamedTuple):
    """Watches a stream of arrays, and says on which grid they are best quantized: pure functions over a pytree.

    Attributes:
      init: `(x) -> state`: the empty state for arrays like `x` (or a `jax.ShapeDtypeStruct`); `x` is not counted.
      update: `(state, x, *, mask=None, axis_name=None) -> state`: folds a batch in. `mask` has the rank of `x` (axes of
        size 1 broadcast) and is false at what was never there. `axis_name` names mapped axes that the batch is spread
        over; it is then reduced as one batch first.
      merge: `(state, state) -> state`: the state of two streams together, or None where the order of batches matters.
      calculate_qparams: `(state) -> QParams`.
      recipe: The factory and its arguments: prints the observer, and rebuilds it with others.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> observer = jqobs.min_max(qdtype=jqobs.quint8)
      >>> x = jnp.array([-1.0, 3.0])
      >>> state = observer.update(observer.init(x), x)
      >>> int(observer.calculate_qparams(state).zero_point)
      64
      >>> observer.replace(qdtype=jqobs.qint4)
      min_max(qdtype=qint4)
    """

    init: InitFn
    update: UpdateFn
    merge: MergeFn | None
    calculate_qparams: CalculateQParamsFn
    recipe: Recipe

    def replace(self, **changes: Any) -> Observer:
        """The same observer with some arguments of its factory changed."""
        return self.recipe.with_args(**changes)()

    def __reduce__(self) -> Any:
        # A copy or a pickle is built again by the recipe, and so is the same object in the same process.
        return Recipe.__call__, (self.recipe,)

    def __repr__(self) -> str:
        return repr(self.recipe)


class Chunk(NamedTuple):
    """A batch of one group of values, or a chunk of it, as a statistic is shown it.

    Attributes:
      x: float32 of any shape.
      where: Booleans of the same shape; what they exclude may be NaN or infinite.
      min_val: The smallest of the values at `where`, or +inf; of the whole batch for a statistic that `widen`s.
      max_val: The largest of the values at `where`, or -inf; likewise.

    Example:
      >>> import jax.numpy as jnp
      >>> from jqobs.observers.observer import Chunk
      >>> x = jnp.array([1.0, 2.0])
      >>> Chunk(x=x, where=x > 0, min_val=x.min(), max_val=x.max()).max_val.item()
      2.0
    """

    x: jax.Array
    where: jax.Array
    min_val: jax.Array
    max_val: jax.Array


class Statistic(NamedTuple):
    """What is remembered of one group of values; `jqobs.lift` makes an Observer of it.

    A statistic knows nothing of channels, groups, grids, masks or devices. Its states and summaries are NamedTuples
    that share the fields `seen` and `nonfinite` (a `Count` each): the statistic declares and may read them, and the
    lifting fills them in. The functions are traced, and mapped over channels and groups by `jax.vmap`.

    Attributes:
      name: The name in error messages: the factory's.
      init: `() -> state`: nothing seen. With float32 leaves where a value is remembered.
      summarize: `(chunk, state) -> summary`: one batch of one group, or a chunk of it (see `Chunk`). Few statistics
        look at `state`.
      reduce: `(summary, summary) -> summary`: two chunks of the same batch.
      fold: `(state, summary) -> state`: the next batch. The lifting drops the result where the batch was empty.
      merge: `(state, state) -> state`: another stream; associative, commutative, `init()` its identity. None where the
        order of batches matters.
      bounds: `(state, grid) -> (min_val, max_val)`: which real range is kept.
      widen: `(state, min_val, max_val) -> state`: what a state has to know of the extremes of a batch before the batch
        is summarized. None, for almost all, spares a pass over the data.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> from jqobs.observers._min_max import STATISTIC
      >>> STATISTIC.name, STATISTIC.fold is STATISTIC.merge
      ('min_max', True)
    """

    name: str
    init: Callable[[], State]
    summarize: Callable[[Chunk, State], Any]
    reduce: Callable[[Any, Any], Any]
    fold: Callable[[State, Any], State]
    merge: Callable[[State, State], State] | None
    bounds: Callable[[State, Grid], tuple[jax.Array, jax.Array]]
    widen: Callable[[State, jax.Array, jax.Array], State] | None = None


def stateless(calculate_qparams: Callable[[], QParams]) -> Observer:
    """An observer that remembers nothing: its state has no leaves, and its answer is known beforehand.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> jqobs.noop().init(jnp.zeros(3))
      NoState()
    """
    return Observer(
        init=lambda x: NoState(),
        update=lambda state, x, *, mask=None, axis_name=None: state,
        merge=lambda a, b: a,
        calculate_qparams=lambda state: calculate_qparams(),
        recipe=Recipe(stateless),
    )


class NoState(NamedTuple):
    """The state of an observer that remembers nothing."""


def check_observer(observer: Any) -> None:
    """Raises ValueError for what is not an observer, such as a factory that was not called.

    Example:
      >>> import jqobs
      >>> from jqobs.observers.observer import check_observer
      >>> check_observer(jqobs.min_max)
      Traceback (most recent call last):
      ValueError: observer must be an Observer, such as jqobs.min_max(); got the function min_max: call it
    """
    if not isinstance(observer, Observer):
        name = getattr(observer, "__name__", None)
        got = f"the function {name}: call it" if name and callable(observer) else repr(observer)
        raise ValueError(f"observer must be an Observer, such as jqobs.min_max(); got {got}")


def is_calibrated(state: Any) -> Any:
    """Whether each scale that would be read off a state rests on data; usable under a trace, where nothing can be
    raised.

    Args:
      state: A state, or a dict of states.

    Returns:
      Booleans of the shape of the scale; for a dict a dict. A state without counters needs no data, and is calibrated.

    Raises:
      ValueError: Something else.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> observer = jqobs.min_max()
      >>> bool(jqobs.is_calibrated(observer.init(jnp.zeros(3))))
      False
    """
    if isinstance(state, Mapping):
        return {name: is_calibrated(each) for name, each in state.items()}
    if not hasattr(state, "_fields"):
        raise ValueError(f"state must be the state of an observer, or a dict of them; got {state!r}")
    return is_positive(state.seen) if hasattr(state, "seen") else jnp.asarray(True)
