"""Which observer watches which operand of a model."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jqobs.formats.qtypes import per_channel_symmetric, per_tensor_affine, per_tensor_symmetric, qint8
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


def bind_channels(observer: Observer, name: str, *, is_weight: bool, ch_axis: int | None) -> Observer:
    """Gives a per-channel observer of a weight that names no axis that of the output features.

    Args:
      observer: The observer.
      name: What it watches, for the error.
      is_weight: Whether that is a weight.
      ch_axis: The axis of the output features; None for a weight that has none, such as a vector: it is one channel.

    Raises:
      ValueError: A per-channel observer of an activation that names no axis.

    Example:
      >>> import jqobs
      >>> from jqobs.models.qconfig import bind_channels
      >>> observer = jqobs.min_max(qscheme=jqobs.per_channel_symmetric, qdtype=jqobs.qint8)
      >>> bind_channels(observer, "up/rhs", is_weight=True, ch_axis=1)
      min_max(qscheme=per_channel_symmetric, qdtype=qint8, ch_axis=1)
    """
    qscheme = observer.recipe.get("qscheme")
    if qscheme is None or not qscheme.is_per_channel or observer.recipe.get("ch_axis") is not None:
        return observer
    if not is_weight:
        raise ValueError(
            f"ch_axis must be given in {observer!r} for the activation {name}: only of a weight does the operation say "
            "which axis holds the output features"
        )
    if ch_axis is None:
        return observer.replace(
            qscheme=per_tensor_symmetric if qscheme.is_symmetric else per_tensor_affine, group_size=None
        )
    return observer.replace(ch_axis=ch_axis)


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
        """What holds for a part: of several names the longest that fits, of several types the nearest base class; what
        was set later goes before.
        """
        named = [(pattern, qconfig) for pattern, qconfig in reversed(self.names) if _contains(pattern, name)]
        if named:
            return max(named, key=lambda pair: pair[0].count("/"))[1]
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


def assign_observers(observers: Any, sites: Mapping[str, Site]) -> dict[str, Observer]:
    """Decides which observer watches which site.

    Args:
      observers: An Observer for every operand, a QConfig, a QConfigMapping over the names and primitives of operations,
        or an ordered mapping from patterns to an Observer, a QConfig or None. A pattern is the name of a site or of an
        operation, or a glob over these; an exact name goes before all globs, and among those the first that matches
        counts.
      sites: All sites by name.

    Returns:
      The observer of every site that has one. An Observer watches results only where its pattern ends in "out".

    Raises:
      ValueError: A pattern that matches no site, with the nearest names; or something that is no observer.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> fn = lambda params, x: x @ params["up"] @ params["down"]
      >>> args = {"up": jnp.ones((3, 4)), "down": jnp.ones((4, 3))}, jnp.ones((2, 3))
      >>> calibration = jqobs.observe(fn, {"down": None, "*": jqobs.min_max()}, weight_argnums=0)
      >>> list(calibration.init(*args))
      ['up/lhs', 'up/rhs']
    """
    if isinstance(observers, QConfigMapping):
        return _assign_mapping(observers, sites)
    rules = observers if isinstance(observers, Mapping) else {"*": observers}
    chosen: dict[str, Observer] = {}
    kinds = {
        pattern: rule if isinstance(rule, QConfig) else as_observer(f"observers[{pattern!r}]", rule)
        for pattern, rule in rules.items()
    }
    for pattern in rules:
        # One rule for everything may well meet a function without products.
        if isinstance(observers, Mapping):
            find_sites(pattern, sites)
    for name, site in sites.items():
        exact = [pattern for pattern in rules if pattern in (name, site.operation)]
        for pattern in (*exact, *(pattern for pattern in rules if _matches(pattern, site))):
            rule = kinds[pattern]
            if isinstance(rule, QConfig):
                rule = rule.observer_for(site)
            elif site.side == "out" and not pattern.endswith("out"):
                continue
            if rule is not None:
                chosen[name] = rule
            break
    return chosen


def find_sites(pattern: str, sites: Mapping[str, Site]) -> list[str]:
    """The names of the sites that a pattern matches.

    Raises:
      ValueError: There is none; the error shows the nearest names.

    Example:
      >>> from jqobs.models.qconfig import find_sites
      >>> find_sites("up/lsh", {})
      Traceback (most recent call last):
      ValueError: the pattern 'up/lsh' matches no site; there is none
    """
    if not isinstance(pattern, str):
        raise ValueError(f"a pattern must be a string over site names, such as 'layers/*/mlp/*'; got {pattern!r}")
    matched = [name for name, site in sites.items() if _matches(pattern, site)]
    if not matched:
        raise ValueError(f"the pattern {pattern!r} matches no site; {suggest(pattern, sites)}")
    return matched


def suggest(name: str, names: Iterable[str]) -> str:
    """Names near to one that is not there, in words.

    Example:
      >>> from jqobs.models.qconfig import suggest
      >>> suggest("up/lsh", ["up/lhs", "down/rhs"])
      'the nearest are up/lhs, down/rhs'
    """
    nearest: Sequence[str] = difflib.get_close_matches(name, list(names), n=5, cutoff=0.0)
    return f"the nearest are {', '.join(nearest)}" if nearest else "there is none"


def _matches(pattern: str, site: Site) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in (site.name, site.operation))


def _assign_mapping(mapping: QConfigMapping, sites: Mapping[str, Site]) -> dict[str, Observer]:
    for known, _ in mapping.types:
        if isinstance(known, type):
            raise ValueError(
                f"set_object_type({known.__name__}, ...) is for prepare_qat, which sees layers; jqobs.observe sees "
                "primitives: give the name of one, such as 'conv_general_dilated', or use set_module_name"
            )
    for pattern, _ in mapping.names:
        if not any(_contains(pattern, site.operation) for site in sites.values()):
            raise ValueError(f"the module name {pattern!r} matches no site; {suggest(pattern, sites)}")
    chosen = {}
    for name, site in sites.items():
        qconfig = mapping.find(site.operation, site.primitive)
        observer = None if qconfig is None else qconfig.observer_for(site)
        if observer is not None:
            chosen[name] = observer
    return chosen


def _contains(pattern: str, name: str) -> bool:
    """Whether a name is, or lies inside, what the pattern names."""
    return any(fnmatch.fnmatchcase(part, pattern) for part in itertools.accumulate(name.split("/"), "{}/{}".format))


def _checked(qconfig: Any) -> QConfig | None:
    if qconfig is None or isinstance(qconfig, QConfig):
        return qconfig
    raise ValueError(f"qconfig must be a QConfig, or None to leave it in float; got {qconfig!r}")
