"""Which observer watches which operand of a model."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jqobs.observer import Observer, Recipe
from jqobs.tracing import Site


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
      >>> from jqobs.qconfig import as_observer
      >>> as_observer("weight", jqobs.linen.PerChannelMinMaxObserver.with_args(ch_axis=1))
      min_max(qscheme=per_channel_symmetric, qdtype=qint8, ch_axis=1)
    """
    if recipe is None or isinstance(recipe, Observer):
        return recipe
    if isinstance(recipe, Recipe):
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


def assign_observers(observers: Any, sites: Mapping[str, Site]) -> dict[str, Observer]:
    """Decides which observer watches which site.

    Args:
      observers: An Observer for every operand, a QConfig, or an ordered mapping from patterns to either or to None. A
        pattern is the name of a site or of an operation, or a glob over these; an exact name goes before all globs,
        and among those the first that matches counts.
      sites: All sites by name.

    Returns:
      The observer of every site that has one. An Observer watches results only where its pattern ends in "out".

    Raises:
      ValueError: A pattern that matches no site, with the nearest names; or something that is no observer.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> fn = lambda params, x: x @ params["up"] @ params["down"]
      >>> args = {"up": jnp.ones((3, 4)), "down": jnp.ones((4, 3))}, jnp.ones((2, 3))
      >>> calibration = jqobs.observe(fn, {"down": None, "*": jqobs.min_max()}, params=0)
      >>> list(calibration.init(*args))
      ['up/lhs', 'up/rhs']
    """
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
      >>> from jqobs.qconfig import find_sites
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
      >>> from jqobs.qconfig import suggest
      >>> suggest("up/lsh", ["up/lhs", "down/rhs"])
      'the nearest are up/lhs, down/rhs'
    """
    nearest: Sequence[str] = difflib.get_close_matches(name, list(names), n=5, cutoff=0.0)
    return f"the nearest are {', '.join(nearest)}" if nearest else "there is none"


def _matches(pattern: str, site: Site) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in (site.name, site.operation))
