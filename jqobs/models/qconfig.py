"""What is wanted of a model: which observers an operation gets, and which part of a model gets which of these."""

from __future__ import annotations

import dataclasses
from typing import Any

from jqobs.formats.qdtype import qint8
from jqobs.formats.qscheme import per_channel_symmetric
from jqobs.models.patterns import find_pattern
from jqobs.observers import log_histogram, min_max, moving_average_min_max
from jqobs.observers.observer import Observer
from jqobs.recipe import Recipe
from jqobs.tracing.program import Site


@dataclasses.dataclass(frozen=True)
class QConfig:
    """The observers of an operation: of what flows into it, of its weight, and on request of its result.

    Attributes:
      activation: An Observer, a recipe of one, or None to leave activations in float.
      weight: The same for weights. A per-channel observer needs no `ch_axis`: the operation says which axis holds the
        output features.
      output: The same for results.

    Raises:
      ValueError: Something else, such as a Flax module.

    Example:
      >>> import jqobs
      >>> jqobs.QConfig(
      ...     activation=jqobs.log_histogram(qdtype=jqobs.quint4),
      ...     weight=jqobs.min_max(qscheme=jqobs.per_channel_symmetric, qdtype=jqobs.qint4),
      ... )
      QConfig(activation=log_histogram(qdtype=quint4), weight=min_max(qscheme=per_channel_symmetric, qdtype=qint4))
    """

    activation: Any = None
    weight: Any = None
    output: Any = None

    def __post_init__(self) -> None:
        for field in ("activation", "weight", "output"):
            object.__setattr__(self, field, as_observer(field, getattr(self, field)))

    def observer_for(self, site: Site) -> Observer | None:
        """The one of the observers that watches that side of an operation."""
        return self.output if site.side == "out" else self.weight if site.is_weight else self.activation

    def __repr__(self) -> str:
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return f"QConfig({', '.join(f'{name}={value!r}' for name, value in given.items() if value is not None)})"


def as_observer(name: str, recipe: Any) -> Observer | None:
    """The functional observer of whatever can stand for one: itself, a recipe, or None.

    Raises:
      ValueError: Anything else; it says what to write.

    Example:
      >>> import jqobs
      >>> from jqobs.models.qconfig import as_observer
      >>> as_observer("weight", jqobs.linen.PerChannelMinMaxObserver.with_args(ch_axis=1))
      min_max(qscheme=per_channel_symmetric, qdtype=qint8, ch_axis=1)
    """
    if recipe is None or isinstance(recipe, Observer):
        return recipe
    if isinstance(recipe, Recipe) or (isinstance(recipe, type) and hasattr(recipe, "with_args")):
        built = recipe()
        observer = built if isinstance(built, Observer) else getattr(built, "observer", None)
        if isinstance(observer, Observer):
            return observer
    layer: Any = recipe
    if isinstance(getattr(layer, "observer", None), Observer):
        kind = type(layer).__name__
        raise ValueError(
            f"{name} must be a recipe, not a layer, which would be shared by all that it watches; write "
            f"{kind}.with_args(...) in place of {kind}(...), or give the functional observer {layer.observer!r}"
        )
    called = f"the function {layer.__name__}: call it" if hasattr(layer, "__name__") else repr(layer)
    raise ValueError(f"{name} must be an Observer such as jqobs.min_max(), a recipe of one, or None; got {called}")


@dataclasses.dataclass(frozen=True)
class QConfigMapping:
    """Which part of a model has which `QConfig`: by name, else by the type of the layer, else the global one.

    Every `set_...` returns a new mapping. None leaves a part in float.

    Example:
      >>> import jqobs
      >>> from flax import linen as nn
      >>> mapping = (
      ...     jqobs.get_default_qconfig_mapping()
      ...     .set_object_type(nn.Conv, None)
      ...     .set_module_name("layers/0", jqobs.QConfig(weight=jqobs.min_max(qdtype=jqobs.qint4)))
      ... )
      >>> mapping.find("layers/0/mlp/up", nn.Dense)
      QConfig(weight=min_max(qdtype=qint4))
      >>> mapping.find("stem", nn.Conv) is None
      True
    """

    overall: QConfig | None = None
    types: tuple[tuple[Any, QConfig | None], ...] = ()
    names: tuple[tuple[str, QConfig | None], ...] = ()

    def set_global(self, qconfig: QConfig | None) -> QConfigMapping:
        """The `QConfig` of all that is not named otherwise."""
        return dataclasses.replace(self, overall=_checked(qconfig))

    def set_object_type(self, object_type: Any, qconfig: QConfig | None) -> QConfigMapping:
        """That of all layers of a class; for `jqobs.observe`, which sees no layers, of a primitive by its name."""
        if not isinstance(object_type, type | str):
            raise ValueError(f"object_type must be a class of layers or the name of a primitive; got {object_type!r}")
        return dataclasses.replace(self, types=(*self.types, (object_type, _checked(qconfig))))

    def set_module_name(self, module_name: str, qconfig: QConfig | None) -> QConfigMapping:
        """That of a module and of all inside it: its path, joined by "/", or a glob over paths."""
        if not isinstance(module_name, str):
            raise ValueError(f"module_name must be a path such as 'layers/0/mlp'; got {module_name!r}")
        return dataclasses.replace(self, names=(*self.names, (module_name, _checked(qconfig))))

    def find(self, name: str, object_type: Any) -> QConfig | None:
        """What holds for a part: by its name (see `jqobs.models.patterns`), else by the nearest of its base classes.

        What was set later goes before.
        """
        by_name = dict(self.names)  # Of equal patterns the last.
        pattern = find_pattern(name, [pattern for pattern, _ in reversed(self.names)])
        if pattern is not None:
            return by_name[pattern]
        classes = object_type.__mro__ if isinstance(object_type, type) else [object_type]
        for each in classes:
            for known, qconfig in reversed(self.types):
                if known == each:
                    return qconfig
        return self.overall


def as_mapping(mapping: Any) -> QConfigMapping:
    """A mapping, or a `QConfig` for everything.

    Raises:
      ValueError: Something else.

    Example:
      >>> import jqobs
      >>> from jqobs.models.qconfig import as_mapping
      >>> as_mapping(jqobs.QConfig()).overall
      QConfig()
    """
    mapping = QConfigMapping().set_global(mapping) if isinstance(mapping, QConfig) else mapping
    if not isinstance(mapping, QConfigMapping):
        raise ValueError(f"mapping must be a QConfigMapping or a QConfig; got {mapping!r}")
    return mapping


def get_default_qconfig() -> QConfig:
    """For calibration after training: the range of least error for activations, a range per channel for weights.

    Example:
      >>> import jqobs
      >>> jqobs.get_default_qconfig()
      QConfig(activation=log_histogram(), weight=min_max(qscheme=per_channel_symmetric, qdtype=qint8))
    """
    return QConfig(activation=log_histogram(), weight=min_max(qscheme=per_channel_symmetric, qdtype=qint8))


def get_default_qat_qconfig() -> QConfig:
    """For training on the grid: the range of activations follows slowly, that of a weight is the weight's own.

    Example:
      >>> import jqobs
      >>> jqobs.get_default_qat_qconfig().activation
      moving_average_min_max()
    """
    weight = moving_average_min_max(averaging_constant=1.0, qscheme=per_channel_symmetric, qdtype=qint8)
    return QConfig(activation=moving_average_min_max(), weight=weight)


def get_default_qconfig_mapping() -> QConfigMapping:
    """`get_default_qconfig()` for everything.

    Example:
      >>> import jqobs
      >>> jqobs.get_default_qconfig_mapping().overall == jqobs.get_default_qconfig()
      True
    """
    return QConfigMapping().set_global(get_default_qconfig())


def get_default_qat_qconfig_mapping() -> QConfigMapping:
    """`get_default_qat_qconfig()` for everything.

    Example:
      >>> import jqobs
      >>> jqobs.get_default_qat_qconfig_mapping().overall == jqobs.get_default_qat_qconfig()
      True
    """
    return QConfigMapping().set_global(get_default_qat_qconfig())


def _checked(qconfig: Any) -> QConfig | None:
    if qconfig is None or isinstance(qconfig, QConfig):
        return qconfig
    raise ValueError(f"qconfig must be a QConfig, or None to leave it in float; got {qconfig!r}")
