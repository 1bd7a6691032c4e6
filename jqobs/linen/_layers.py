"""The layers: `Observe` around any observer, and the classes that users of other frameworks know by name."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, TypeVar

import jax.numpy as jnp
from flax import linen as nn

from jqobs import observers
from jqobs.formats.qdtype import QDtype, qint8, quint8
from jqobs.formats.qscheme import QScheme, per_channel_symmetric, per_tensor_affine, per_tensor_symmetric
from jqobs.layers.fake_quant import FakeQuantFlags, apply_fake_quant, observe_step, read_qparams, searches, with_flags
from jqobs.models.qconfig import as_observer
from jqobs.observers.observer import Observer, check_observer
from jqobs.quantization.qparams import QParams
from jqobs.range_rules import Range, mse
from jqobs.recipe import Recipe

T = TypeVar("T")


class ObservingLayer(nn.Module):
    """An identity that shows its input to `self.observer`. The statistic is the variable "state" of "observers".

    It observes when that collection is mutable, and not during `init`. Otherwise nothing is traced at all.
    """

    @nn.compact
    def __call__(self, x: T, mask: Any = None) -> T:
        """Returns `x` itself; `mask` (of its rank) is false where a value is to be left out of the statistic."""
        if self.is_mutable_collection("observers") and jnp.size(x):  # pyright: ignore[reportArgumentType]
            state = self.variable("observers", "state", self.observer.init, x)
            if not self.is_initializing():
                state.value = self.observer.update(state.value, x, mask=mask, axis_name=self.axis_name)
        return x

    def calculate_qparams(self) -> QParams:
        """The grid for what was seen; of a bound layer, or by `layer.apply(variables, method="calculate_qparams")`."""
        return self.observer.calculate_qparams(self.get_variable("observers", "state"))


class Observe(ObservingLayer):
    """Shows its input to any observer, and returns it.

    Attributes:
      observer: The observer.
      axis_name: The mapped axis, or several, over which a batch is spread: then all devices keep one statistic.

    Example:
      >>> import jax, jax.numpy as jnp, jqobs
      >>> from flax import linen as nn
      >>> model = nn.Sequential([nn.Dense(4), jqobs.linen.Observe(jqobs.log_histogram())])
      >>> x = jnp.ones((2, 3))
      >>> variables = model.init(jax.random.key(0), x)
      >>> y, observed = model.apply(variables, x, mutable=["observers"])
      >>> int(observed["observers"]["layers_1"]["state"].seen)
      8
    """

    observer: Observer
    axis_name: Hashable | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_observer(self.observer)
        super().__post_init__()


class ObserverBase(ObservingLayer):
    """What the named classes share: constructor arguments that are those of their functional observer.

    Abstract: a class of your own sets `factory` to a function made by `jqobs.factory`, and declares its further
    arguments as fields.

    Attributes:
      qscheme: The scheme.
      qdtype: The type of the codes.
      ch_axis: The channel axis; None for per-tensor schemes, whatever was given.
      eps: A floor under the scale; None for the grid's own.
      group_size: How many values of a channel share a scale; None for all of them.
      axis_name: The mapped axis, or several, over which a batch is spread: then all devices keep one statistic.
    """

    qscheme: QScheme = per_tensor_affine
    qdtype: QDtype = quint8
    ch_axis: int | None = None
    eps: float | None = None
    group_size: int | None = dataclasses.field(default=None, kw_only=True)
    axis_name: Hashable | None = dataclasses.field(default=None, kw_only=True)

    factory: ClassVar[Callable[..., Observer] | None] = None

    def __post_init__(self) -> None:
        if isinstance(self.qscheme, QScheme) and not self.qscheme.is_per_channel:
            self.ch_axis = None
        if self.factory is not None:
            _ = self.observer  # A bad argument dies where it was written.
        super().__post_init__()

    @property
    def observer(self) -> Observer:
        """The functional observer with the arguments of this layer."""
        if self.factory is None:
            raise NotImplementedError(f"{type(self).__name__} is abstract: a subclass sets `factory`")
        taken = inspect.signature(self.factory).parameters
        return self.factory(**{name: getattr(self, name) for name in self.__dataclass_fields__ if name in taken})

    @classmethod
    def with_args(cls, **arguments: Any) -> Recipe:
        """A recipe: `recipe()` builds a layer with these arguments, `recipe.with_args(...)` adds to them."""
        return Recipe(cls).with_args(**arguments)


class FakeQuantize(ObservingLayer):
    """Observes its input, and rounds it to the grid of what was seen: for training with the grid in place.

    Until it has seen data it is the identity. While the collection "observers" is mutable it shows its input to the
    observer; it rounds whether it is or not. Both are also switched by arrays in that collection, that are saved and
    restored with it: by the methods `enable_observer` and so on, or for a whole model by `jqobs.linen.enable_observer`.

    Attributes:
      observer: An Observer, a recipe of one, or a class of observing layers.
      update_qparams: Whether a step that observes also reads the grid; None: unless that is a search. Where it does
        not, the grid is what `read_qparams` left (`jqobs.linen.read_qparams` for a whole model).
      axis_name: The mapped axis, or several, over which a batch is spread: then all devices keep one statistic.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> layer = jqobs.linen.FakeQuantize(jqobs.linen.MinMaxObserver.with_args(qdtype=jqobs.quint2))
      >>> y, variables = layer.apply({}, jnp.array([0.2, 3.0]), mutable=["observers"])
      >>> y.tolist(), layer.apply(variables, jnp.array([1.4, 9.0])).tolist()
      ([0.0, 3.0], [1.0, 3.0])
      >>> _, variables = layer.apply(variables, method="disable_fake_quant", mutable=["observers"])
      >>> layer.apply(variables, jnp.array([1.4, 9.0])).tolist()
      [1.399999976158142, 9.0]
    """

    observer: Any
    update_qparams: bool | None = None
    axis_name: Hashable | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        observer = as_observer("observer", self.observer)
        check_observer(observer)
        self.observer = observer
        super().__post_init__()

    @nn.compact
    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        x: Any,
        mask: Any = None,
        *,
        observer_enabled: bool | None = None,
        fake_quant_enabled: bool | None = None,
    ) -> Any:
        """Returns `x` on the grid; the keywords override the flags for this call."""
        live = self.is_mutable_collection("observers") and bool(jnp.size(x))
        if not live and not self.has_variable("observers", "cached_qparams"):
            return x
        observer: Observer = self.observer
        state = self.variable("observers", "state", observer.init, x)
        cached = self.variable("observers", "cached_qparams", lambda: read_qparams(observer, state.value))
        flags = self.variable("observers", "flags", FakeQuantFlags.on)
        if live and not self.is_initializing():
            enabled = flags.value.observer_enabled if observer_enabled is None else observer_enabled
            update_qparams = not searches(observer) if self.update_qparams is None else self.update_qparams
            state.value, cached.value = observe_step(
                observer,
                state.value,
                cached.value,
                x,
                mask,
                enabled,
                axis_name=self.axis_name,
                update_qparams=update_qparams,
            )
        enabled = flags.value.fake_quant_enabled if fake_quant_enabled is None else fake_quant_enabled
        return apply_fake_quant(observer, cached.value, x, enabled)

    def read_qparams(self) -> None:
        """Reads the grid for what was seen: `layer.apply(variables, method="read_qparams", mutable=["observers"])`."""
        state = self.get_variable("observers", "state")
        self.put_variable("observers", "cached_qparams", read_qparams(self.observer, state))

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
        """Switches rounding off: the layer is the identity."""
        self._set_flags(fake_quant_enabled=False)

    def _set_flags(self, **enabled: bool) -> None:
        self.put_variable("observers", "flags", with_flags(self.get_variable("observers", "flags"), **enabled))


class MinMaxObserver(ObserverBase):
    """Tracks the running minimum and maximum: `jqobs.min_max`.

    Example:
      >>> import jax, jqobs
      >>> observer = jqobs.linen.MinMaxObserver()
      >>> x = jax.random.normal(jax.random.key(0), (64, 128))
      >>> y, variables = observer.apply({}, x, mutable=["observers"])
      >>> scale, zero_point = observer.apply(variables, method="calculate_qparams")
      >>> y is x, scale.shape, zero_point.shape
      (True, (), ())
    """

    factory = staticmethod(observers.min_max)


class PerChannelMinMaxObserver(MinMaxObserver):
    """Tracks the running minimum and maximum of every channel.

    Example:
      >>> import jqobs
      >>> recipe = jqobs.linen.PerChannelMinMaxObserver.with_args(ch_axis=1)
      >>> recipe().ch_axis
      1
    """

    qscheme: QScheme = per_channel_symmetric
    qdtype: QDtype = qint8
    ch_axis: int | None = 0


class MovingAverageMinMaxObserver(ObserverBase):
    """Tracks moving averages of the minimum and the maximum of a batch: `jqobs.moving_average_min_max`."""

    averaging_constant: float = 0.01

    factory = staticmethod(observers.moving_average_min_max)


class MovingAveragePerChannelMinMaxObserver(MovingAverageMinMaxObserver):
    """Tracks moving averages of the minimum and the maximum of every channel of a batch."""

    qscheme: QScheme = per_channel_symmetric
    qdtype: QDtype = qint8
    ch_axis: int | None = 0


class HistogramObserver(ObserverBase):
    """Tracks a histogram with bins of equal width over the running range: `jqobs.histogram`."""

    bins: int = 2048
    range_rule: Callable[..., Range] = mse()

    factory = staticmethod(observers.histogram)


class LogHistogramObserver(ObserverBase):
    """Tracks a histogram whose bins never move: `jqobs.log_histogram`."""

    bins_per_octave: int = 128
    range_rule: Callable[..., Range] = mse()

    factory = staticmethod(observers.log_histogram)


class FixedQParamsObserver(ObserverBase):
    """Answers with the scale and the zero point that it was given, whatever it is shown: `jqobs.fixed_qparams`.

    Example:
      >>> import jqobs
      >>> sigmoid = jqobs.linen.FixedQParamsObserver(scale=1 / 256, zero_point=0)
      >>> scale, zero_point = sigmoid.apply({}, method="calculate_qparams")
      >>> float(scale), int(zero_point)
      (0.00390625, 0)
    """

    scale: float | tuple[float, ...] = 1.0
    zero_point: int | tuple[int, ...] = 0

    factory = staticmethod(observers.fixed_qparams)


class PlaceholderObserver(ObserverBase):
    """Watches nothing and carries a type: `jqobs.placeholder`."""

    custom_op_name: str = ""
    is_dynamic: bool = False

    factory = staticmethod(observers.placeholder)


class NoopObserver(ObserverBase):
    """Watches nothing and has no grid: `jqobs.noop`."""

    factory = staticmethod(observers.noop)


default_observer = MinMaxObserver.with_args(qdtype=dataclasses.replace(quint8, quant_max=127))
"""For activations: codes 0..127, so that sums of products stay clear of overflow on hardware with 16-bit sums."""

default_weight_observer = MinMaxObserver.with_args(qscheme=per_tensor_symmetric, qdtype=qint8)
"""For weights: symmetric codes -128..127."""

default_dynamic_quant_observer = PlaceholderObserver.with_args(qdtype=quint8, is_dynamic=True)
"""For activations whose range is taken at run time."""
