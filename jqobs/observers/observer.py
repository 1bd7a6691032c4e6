"""The unit of the library: an Observer, pure functions over a pytree, and what it says of itself."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp

from jqobs.formats.quant_spec import QuantSpec
from jqobs.numerics.counting import is_positive
from jqobs.observers.statistic import State
from jqobs.quantization.qparams import QParams
from jqobs.recipe import Recipe, factory


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
      spec: Which codes there are, and who shares a scale; None of an observer that has no scale.
      range_rule: Which range of its histogram is kept; None where nothing is searched.
      with_spec: `(spec) -> Observer`: the same statistic and rule under another spec; None where there is none.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> observer = jqobs.min_max(qdtype=jqobs.quint8)
      >>> x = jnp.array([-1.0, 3.0])
      >>> state = observer.update(observer.init(x), x)
      >>> int(observer.calculate_qparams(state).zero_point)
      64
      >>> observer.replace(qdtype=jqobs.qint4)
      min_max(qdtype=qint4)
      >>> observer.spec
      QuantSpec(quint8, per_tensor_affine)
    """

    init: InitFn
    update: UpdateFn
    merge: MergeFn | None
    calculate_qparams: CalculateQParamsFn
    recipe: Recipe
    spec: QuantSpec | None = None
    range_rule: Callable[..., Any] | None = None
    with_spec: Callable[[QuantSpec], Observer] | None = None

    @property
    def of_one_group(self) -> Observer:
        """The same with one scale for all of an array."""
        if self.spec is None or self.with_spec is None:
            return self
        return self.with_spec(self.spec.per_tensor)

    def replace(self, **changes: Any) -> Observer:
        """The same observer with some arguments of its factory, or some fields of its spec, changed.

        Raises:
          ValueError: What is no argument of its factory is no field of its spec either, or it cannot be given another.
        """
        base, of_spec = self._origin()
        taken = inspect.signature(base.recipe.factory).parameters
        of_factory = {name: value for name, value in changes.items() if name in taken}
        of_spec |= {name: value for name, value in changes.items() if name not in taken}
        fields = [field.name for field in dataclasses.fields(QuantSpec)]
        if of_spec and (base.with_spec is None or not of_spec.keys() <= set(fields)):
            raise ValueError(
                f"{self!r} takes no {', '.join(of_spec.keys())}: its factory has no such argument; beside those, "
                f"the {', '.join(fields)} of an observer that jqobs.lift made can be changed"
            )
        base = base.recipe.with_args(**of_factory)() if of_factory else base
        return respecified(observer=base, changes=tuple(of_spec.items())) if of_spec else base

    def _origin(self) -> tuple[Observer, dict[str, Any]]:
        """What was built by a factory of its own, and what of its spec was changed since."""
        given = dict(self.recipe.arguments)
        return (given["observer"], dict(given["changes"])) if self.recipe.factory is respecified else (self, {})

    def __reduce__(self) -> Any:
        # A copy or a pickle is built again by the recipe, and so is the same object in the same process.
        return Recipe.__call__, (self.recipe,)

    def __repr__(self) -> str:
        base, changes = self._origin()
        changed = ", ".join(f"{name}={value!r}" for name, value in changes.items())
        return f"{base!r}.replace({changed})" if changes else repr(self.recipe)


@factory
def respecified(*, observer: Observer, changes: tuple[tuple[str, Any], ...]) -> Observer:
    """An observer with fields of its spec changed, where its own factory has no arguments of these names.

    Example:
      >>> import jqobs
      >>> from jqobs.observers.observer import respecified
      >>> respecified(observer=jqobs.min_max(), changes=(("qdtype", jqobs.qint4),)).spec
      QuantSpec(qint4, per_tensor_affine)
    """
    assert observer.with_spec is not None and observer.spec is not None  # noqa: PT018  (`replace` has checked)
    return observer.with_spec(observer.spec.replace(**dict(changes)))


def stateless(calculate_qparams: Callable[[], QParams], spec: QuantSpec | None = None) -> Observer:
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
        spec=spec,
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
