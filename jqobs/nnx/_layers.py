"""The modules: `Observe` around any observer, and the classes that users of other frameworks know by name."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqobs import observers
from jqobs.formats.qdtype import QDtype, qint8, quint8
from jqobs.formats.qscheme import QScheme, per_channel_symmetric, per_tensor_affine, per_tensor_symmetric
from jqobs.layers.fake_quant import (
    CachedQParams,
    FakeQuantFlags,
    apply_fake_quant,
    observe_step,
    read_qparams,
    searches,
    with_flags,
)
from jqobs.models.qconfig import as_observer
from jqobs.observers.observer import NotCalibratedError, Observer, check_observer
from jqobs.quantization.qparams import QParams
from jqobs.range_rules import Range, mse
from jqobs.recipe import Recipe

T = TypeVar("T")


@dataclass_transform()
def layer(cls: type[T]) -> type[T]:
    """Gives a module the constructor that its fields spell out; modules compare by identity."""
    return dataclasses.dataclass(eq=False, repr=False)(cls)


class ObserverState(nnx.Variable):
    """Holds the state of an observer; the filter for `nnx.split(model, jqobs.nnx.ObserverState, ...)`."""


class ObservingModule(nnx.Module):
    """An identity that shows its input to `self.observer` while `observing`, and keeps the statistic in `state`."""

    observer: Observer
    axis_name: Hashable | None

    def _begin(self, shape: tuple[int, ...] | None) -> None:
        self.observing = True
        self._shape = shape
        self.state = nnx.data(None)  # First as data: a Variable cannot take the place of a static None.
        self.reset()

    def __call__(self, x: T, mask: Any = None) -> T:
        """Returns `x` itself, recorded if `observing`; `mask` (of its rank) is false where a value is left out."""
        if self.observing:
            self.record(x, mask)
        return x

    def record(self, x: Any, mask: Any = None) -> None:
        """Folds a batch into the statistic."""
        if self.state is None:
            if not np.size(x):
                return  # It does not say how many channels there are.
            self.state = ObserverState(self.observer.init(x))
        self.state.set_value(self.observer.update(self.state.get_value(), x, mask=mask, axis_name=self.axis_name))

    def reset(self) -> None:
        """Back to nothing seen, as a fresh module."""
        observer, example = self.observer, jax.ShapeDtypeStruct(self._shape or (), jnp.float32)
        try:
            self.set_variables({"state": observer.init(example)})
        except ValueError:
            if self._shape is not None:
                raise
            self.state = None  # There are channels, and the first batch tells how many.

    @property
    def rank(self) -> int:
        """The rank of a scale: 0 per tensor, 1 per channel, 2 per group."""
        return 0 if self.observer.spec is None else self.observer.spec.rank

    def get_variables(self, *, of_one_channel: bool = False) -> dict[str, Any]:
        """What this module holds by the name of the attribute; `of_one_channel` where it has seen nothing yet."""
        if of_one_channel:
            return {"state": self.observer.of_one_group.init(0.0)}
        return {} if self.state is None else {"state": self.state.get_value()}

    def set_variables(self, cached: dict[str, Any]) -> None:
        """Takes over what `get_variables` of another module has returned."""
        for name, value in cached.items():
            variable = getattr(self, name)
            if variable is None:
                setattr(self, name, ObserverState(value))
            else:  # Views of the module share it.
                variable.set_value(value)

    def calculate_qparams(self) -> QParams:
        """The grid for what was seen."""
        return self.observer.calculate_qparams(None if self.state is None else self.state.get_value())

    def set_view(self, observing: bool | None = None) -> None:
        """Switches recording; called by `nnx.view(model, observing=...)`."""
        if observing is not None:
            self.observing = observing

    @property
    def min_val(self) -> jax.Array:
        """The lower end of the range seen."""
        return self._value().min_val

    @property
    def max_val(self) -> jax.Array:
        """The upper end of the range seen."""
        return self._value().max_val

    @property
    def histogram(self) -> Any:
        """The values seen per bin, of an observer that keeps a histogram."""
        return self._value().histogram

    def _value(self) -> Any:
        if self.state is None:
            raise NotCalibratedError(f"{self.observer!r} has no state yet: call it once, or build it with shape=")
        return self.state.get_value()


class Observe(ObservingModule):
    """Shows its input to any observer, and returns it.

    Args:
      observer: The observer.
      shape: The shape of the data. Only a per-channel observer needs it, and only where the state has to exist before
        the first call, as inside `nnx.scan`.
      axis_name: The mapped axis, or several, over which a batch is spread: then all devices keep one statistic.
      rngs: Ignored; taken so that it can be built like any other module.

    Attributes:
      observer: The observer.
      observing: Whether a call records. Switched by `nnx.view(model, observing=False)`.
      state: An `ObserverState`, or None while a per-channel observer has seen nothing.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> layer = jqobs.nnx.Observe(jqobs.log_histogram())
      >>> x = jnp.array([-1.0, 3.0])
      >>> layer(x) is x, layer.min_val.item(), layer.max_val.item()
      (True, -1.0, 3.0)
    """

    def __init__(
        self,
        observer: Observer,
        *,
        shape: tuple[int, ...] | None = None,
        axis_name: Hashable | None = None,
        rngs: Any = None,
    ):
        del rngs
        check_observer(observer)
        self.observer = observer
        self.axis_name = axis_name
        self._begin(shape)


@layer
class ObserverBase(ObservingModule):
    """What the named classes share: constructor arguments that are those of their functional observer.

    Abstract: a class of your own is decorated with `dataclasses.dataclass(eq=False, repr=False)`, sets `factory` to a
    function made by `jqobs.factory`, and declares its further arguments as fields.

    Attributes:
      qscheme: The scheme.
      qdtype: The type of the codes.
      ch_axis: The channel axis; None for per-tensor schemes, whatever was given.
      eps: A floor under the scale; None for the grid's own.
      group_size: How many values of a channel share a scale; None for all of them.
      axis_name: The mapped axis, or several, over which a batch is spread: then all devices keep one statistic.
      shape: The shape of the data, as for `Observe`.
      rngs: Ignored, and not kept.
    """

    qscheme: QScheme = per_tensor_affine
    qdtype: QDtype = quint8
    ch_axis: int | None = None
    eps: float | None = None
    group_size: int | None = dataclasses.field(default=None, kw_only=True)
    axis_name: Hashable | None = dataclasses.field(default=None, kw_only=True)
    shape: tuple[int, ...] | None = dataclasses.field(default=None, kw_only=True)
    rngs: dataclasses.InitVar[Any] = dataclasses.field(default=None, kw_only=True)

    factory: ClassVar[Callable[..., Observer] | None] = None

    def __post_init__(self, rngs: Any) -> None:
        del rngs
        if isinstance(self.qscheme, QScheme) and not self.qscheme.is_per_channel:
            self.ch_axis = None
        self.observing = False
        if self.factory is not None:
            self._begin(self.shape)

    @property
    def observer(self) -> Observer:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The functional observer with the arguments of this module."""
        if self.factory is None:
            raise NotImplementedError(f"{type(self).__name__} is abstract: a subclass sets `factory`")
        taken = inspect.signature(self.factory).parameters
        return self.factory(**{name: getattr(self, name) for name in self.__dataclass_fields__ if name in taken})

    @classmethod
    def with_args(cls, **arguments: Any) -> Recipe:
        """A recipe: `recipe()` builds a module with these arguments, `recipe.with_args(...)` adds to them."""
        return Recipe(cls).with_args(**arguments)


class FakeQuantize(ObservingModule):
    """Observes its input, and rounds it to the grid of what was seen: for training with the grid in place.

    Until it has seen data it is the identity. It observes and rounds as its two flags say, which are state like the
    statistic: saved, restored, and changed without compiling anything, by the methods `enable_observer` and so on, or
    for a whole model by `jqobs.nnx.enable_observer`. `nnx.view(model, observing=False)` keeps it from observing too.

    Args:
      observer: An Observer, a recipe of one, or a class of observing modules.
      update_qparams: Whether a step that observes also reads the grid; None: unless that is a search. Where it does
        not, the grid is what `read_qparams` left (`jqobs.nnx.read_qparams` for a whole model).
      shape: The shape of the data, as for `Observe`.
      axis_name: The mapped axis, or several, over which a batch is spread: then all devices keep one statistic.
      rngs: Ignored.

    Attributes:
      observer: The functional observer.
      state: An `ObserverState` with its statistic, or None.
      cached: An `ObserverState` with the grid that is used, or None.
      flags: An `ObserverState` with the two flags.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> layer = jqobs.nnx.FakeQuantize(jqobs.nnx.MinMaxObserver.with_args(qdtype=jqobs.quint2))
      >>> layer(jnp.array([0.2, 3.0])).tolist()
      [0.0, 3.0]
      >>> layer.disable_observer()
      >>> layer(jnp.array([1.4, 9.0])).tolist()
      [1.0, 3.0]
      >>> layer.disable_fake_quant()
      >>> layer(jnp.array([1.0, 9.0])).tolist()
      [1.0, 9.0]
    """

    def __init__(
        self,
        observer: Any,
        *,
        update_qparams: bool | None = None,
        shape: tuple[int, ...] | None = None,
        axis_name: Hashable | None = None,
        rngs: Any = None,
    ):
        del rngs
        self.axis_name = axis_name
        checked = as_observer("observer", observer)
        check_observer(checked)
        self.observer = checked  # pyright: ignore[reportAttributeAccessIssue]  (checked is no None)
        self.update_qparams = not searches(self.observer) if update_qparams is None else update_qparams
        self.cached_qparams: Any = nnx.data(None)
        self.flags = ObserverState(FakeQuantFlags.on())
        self._begin(shape)

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        x: Any,
        mask: Any = None,
        *,
        observer_enabled: bool | None = None,
        fake_quant_enabled: bool | None = None,
    ) -> Any:
        """Returns `x` on the grid; the keywords override the flags for this call."""
        flags = self.flags.get_value()
        if self.observing and observer_enabled is not False:
            self.record(x, mask, flags.observer_enabled if observer_enabled is None else observer_enabled)
        if self.cached_qparams is None:
            return x
        enabled = flags.fake_quant_enabled if fake_quant_enabled is None else fake_quant_enabled
        return apply_fake_quant(self.observer, self.cached_qparams.get_value(), x, enabled)

    def record(self, x: Any, mask: Any = None, enabled: Any = True) -> None:
        """Folds a batch into the statistic, if `enabled`, and reads the grid if it `update_qparams`."""
        if self.state is None:
            if not np.size(x):
                return  # It does not say how many channels there are.
            self._hold(self.observer.init(x))
        state, cached = self.state, self.cached_qparams
        assert state is not None and cached is not None  # noqa: PT018
        after = observe_step(
            self.observer,
            state.get_value(),
            cached.get_value(),
            x,
            mask,
            enabled,
            axis_name=self.axis_name,
            update_qparams=self.update_qparams,
        )
        state.set_value(after[0])
        cached.set_value(after[1])

    def reset(self) -> None:
        """Back to nothing seen; the flags stay."""
        super().reset()
        if self.state is None:
            self.cached_qparams = None
        else:
            self._hold(self.state.get_value())

    def get_variables(self, *, of_one_channel: bool = False) -> dict[str, Any]:
        """What this module holds by the name of the attribute; `of_one_channel` where it has seen nothing yet."""
        states = super().get_variables(of_one_channel=of_one_channel)
        if self.cached_qparams is not None:
            states["cached_qparams"] = self.cached_qparams.get_value()
        elif of_one_channel:
            states["cached_qparams"] = CachedQParams(jnp.float32(1), jnp.int32(0), jnp.array(False))
        return states | {"flags": self.flags.get_value()}

    def read_qparams(self) -> None:
        """Reads the grid for what was seen."""
        if self.cached_qparams is not None and self.state is not None:
            self.cached_qparams.set_value(read_qparams(self.observer, self.state.get_value()))

    def enable_observer(self, enabled: bool = True) -> None:
        """Switches observing on."""
        self._set_flags(observer_enabled=enabled)

    def disable_observer(self) -> None:
        """Switches observing off: the grid stays as it is."""
        self._set_flags(observer_enabled=False)

    def enable_fake_quant(self, enabled: bool = True) -> None:
        """Switches rounding on."""
        self._set_flags(fake_quant_enabled=enabled)

    def disable_fake_quant(self) -> None:
        """Switches rounding off: the module is the identity."""
        self._set_flags(fake_quant_enabled=False)

    def _set_flags(self, **enabled: bool) -> None:
        self.flags.set_value(with_flags(self.flags.get_value(), **enabled))

    def _hold(self, state: Any) -> None:
        self.set_variables({"state": state, "cached_qparams": read_qparams(self.observer, state)})


@layer
class MinMaxObserver(ObserverBase):
    """Tracks the running minimum and maximum: `jqobs.min_max`.

    Example:
      >>> import jax, jqobs
      >>> observer = jqobs.nnx.MinMaxObserver()
      >>> x = jax.random.normal(jax.random.key(0), (64, 128))
      >>> y = observer(x)
      >>> scale, zero_point = observer.calculate_qparams()
      >>> y is x, scale.shape, zero_point.shape
      (True, (), ())
    """

    factory = staticmethod(observers.min_max)


@layer
class PerChannelMinMaxObserver(MinMaxObserver):
    """Tracks the running minimum and maximum of every channel.

    Example:
      >>> import jqobs
      >>> recipe = jqobs.nnx.PerChannelMinMaxObserver.with_args(ch_axis=1)
      >>> recipe().ch_axis
      1
    """

    qscheme: QScheme = per_channel_symmetric
    qdtype: QDtype = qint8
    ch_axis: int | None = 0


@layer
class MovingAverageMinMaxObserver(ObserverBase):
    """Tracks moving averages of the minimum and the maximum of a batch: `jqobs.moving_average_min_max`."""

    averaging_constant: float = 0.01

    factory = staticmethod(observers.moving_average_min_max)


@layer
class MovingAveragePerChannelMinMaxObserver(MovingAverageMinMaxObserver):
    """Tracks moving averages of the minimum and the maximum of every channel of a batch."""

    qscheme: QScheme = per_channel_symmetric
    qdtype: QDtype = qint8
    ch_axis: int | None = 0


@layer
class HistogramObserver(ObserverBase):
    """Tracks a histogram with bins of equal width over the running range: `jqobs.histogram`."""

    bins: int = 2048
    range_rule: Callable[..., Range] = mse()

    factory = staticmethod(observers.histogram)


@layer
class LogHistogramObserver(ObserverBase):
    """Tracks a histogram whose bins never move: `jqobs.log_histogram`."""

    bins_per_octave: int = 128
    range_rule: Callable[..., Range] = mse()

    factory = staticmethod(observers.log_histogram)


@layer
class FixedQParamsObserver(ObserverBase):
    """Answers with the scale and the zero point that it was given, whatever it is shown: `jqobs.fixed_qparams`.

    Example:
      >>> import jqobs
      >>> scale, zero_point = jqobs.nnx.FixedQParamsObserver(scale=1 / 256, zero_point=0).calculate_qparams()
      >>> float(scale), int(zero_point)
      (0.00390625, 0)
    """

    scale: float | tuple[float, ...] = 1.0
    zero_point: int | tuple[int, ...] = 0

    factory = staticmethod(observers.fixed_qparams)


@layer
class PlaceholderObserver(ObserverBase):
    """Watches nothing and carries a type: `jqobs.placeholder`."""

    custom_op_name: str = ""
    is_dynamic: bool = False

    factory = staticmethod(observers.placeholder)


@layer
class NoopObserver(ObserverBase):
    """Watches nothing and has no grid: `jqobs.noop`."""

    factory = staticmethod(observers.noop)


default_observer = MinMaxObserver.with_args(qdtype=dataclasses.replace(quint8, quant_max=127))
"""For activations: codes 0..127, so that sums of products stay clear of overflow on hardware with 16-bit sums."""

default_weight_observer = MinMaxObserver.with_args(qscheme=per_tensor_symmetric, qdtype=qint8)
"""For weights: symmetric codes -128..127."""

default_dynamic_quant_observer = PlaceholderObserver.with_args(qdtype=quint8, is_dynamic=True)
"""For activations whose range is taken at run time."""
