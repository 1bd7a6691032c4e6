"""Which observer watches which site of a function: decided here from what the user wants, and kept with the state."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any

from jqobs.formats.quant_spec import QuantSpec
from jqobs.models.patterns import find_names, find_pattern
from jqobs.models.qconfig import QConfig, QConfigMapping, as_observer
from jqobs.models.sites import Sites
from jqobs.observers.observer import Observer
from jqobs.tracing.program import Site


@dataclasses.dataclass(frozen=True, repr=False)
class Assignment:
    """All that is known of a model beside its states: static, hashable, and the same for batches of other sizes.

    Attributes:
      sites: The sites of the function, the unobserved ones too, and the calls that nobody can look into.
      observed: The observer of each site that has one, its channel axis bound, in the order of the program.
      groups: The names of the observed sites that share a range.
    """

    sites: Sites
    observed: tuple[tuple[str, Observer], ...]
    groups: tuple[tuple[str, ...], ...] = ()

    @functools.cached_property
    def observers(self) -> dict[str, Observer]:
        """The observer of each observed site."""
        return dict(self.observed)

    def check_agrees(self, other: Assignment) -> None:
        """Raises ValueError for a site that has another observer in each."""
        for name, observer in other.observed:
            own = self.observers.get(name, observer)
            if own != observer:
                raise ValueError(
                    f"the site {name} has one observer in one state and another in the other: {own!r} and {observer!r}"
                )

    def __or__(self, other: Assignment) -> Assignment:
        """What is known of both, of a function whose flags decide what it does."""
        self.check_agrees(other)
        sites = {**other.sites.by_name, **self.sites.by_name}
        opaque_calls = tuple(dict.fromkeys(self.sites.opaque_calls + other.sites.opaque_calls))
        pairs = itertools.zip_longest(self.groups, other.groups, fillvalue=())
        return Assignment(
            Sites(tuple(sites.values()), opaque_calls),
            tuple({**other.observers, **self.observers}.items()),
            tuple(tuple(dict.fromkeys(one + another)) for one, another in pairs),
        )

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.sites, self.observed, self.groups))

    def __hash__(self) -> int:
        return self._hash  # Of every call of a compiled function, and of a model there may be a thousand sites.

    def __getstate__(self) -> dict[str, Any]:
        # Without what was computed: a hash is another one in every process.
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __repr__(self) -> str:
        return f"Assignment({len(self.observed)} observed sites of {len(self.sites)})"


def assign_observers(observers: Any, sites: Mapping[str, Site]) -> dict[str, Observer]:
    """Decides which observer watches which site, and binds the channel axes of weights.

    Args:
      observers: An Observer for every operand, a QConfig, a QConfigMapping over names and primitives, or an ordered
        mapping from patterns (see `jqobs.models.patterns`) to an Observer, a QConfig or None.
      sites: All sites by name.

    Returns:
      The observer of every site that has one. An Observer watches results only where its pattern ends in "out".

    Raises:
      ValueError: A pattern that matches no site, with the nearest names; something that is no observer; an activation
        whose per-channel observer names no axis.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> fn = lambda params, x: x @ params["up"] @ params["down"]
      >>> args = {"up": jnp.ones((3, 4)), "down": jnp.ones((4, 3))}, jnp.ones((2, 3))
      >>> calibration = jqobs.observe(fn, {"down": None, "*": jqobs.min_max()}, weight_argnums=0)
      >>> list(calibration.init(*args))
      ['up/lhs', 'up/rhs']
    """
    find = _finder(observers, sites)
    chosen: dict[str, Observer] = {}
    for name, site in sites.items():
        wanted = find(site)
        observer = wanted.observer_for(site) if isinstance(wanted, QConfig) else wanted
        if observer is not None:
            chosen[name] = bind_channels(observer, name, is_weight=site.is_weight, ch_axis=site.ch_axis)
    return chosen


def _finder(observers: Any, sites: Mapping[str, Site]) -> Any:
    """What is wanted for a site, as a function of it: a QConfig, an Observer or None."""
    if isinstance(observers, QConfigMapping):
        _check_mapping(observers, sites)
        return lambda site: observers.find(site.name, site.primitive)
    if not isinstance(observers, Mapping):  # One rule for everything may well meet a function without products.
        observers = {"*": observers}
    else:
        for pattern in observers:
            find_names(pattern, sites)
    wanted = {
        pattern: rule if isinstance(rule, QConfig) else as_observer(f"observers[{pattern!r}]", rule)
        for pattern, rule in observers.items()
    }
    for_results = [pattern for pattern in wanted if isinstance(wanted[pattern], QConfig) or pattern.endswith("out")]

    def find(site: Site) -> Any:
        pattern = find_pattern(site.name, for_results if site.side == "out" else wanted)
        return None if pattern is None else wanted[pattern]

    return find


def _check_mapping(mapping: QConfigMapping, sites: Mapping[str, Site]) -> None:
    for known, _ in mapping.types:
        if isinstance(known, type):
            raise ValueError(
                f"set_object_type({known.__name__}, ...) is for prepare_qat, which sees layers; jqobs.observe sees "
                "primitives: give the name of one, such as 'conv_general_dilated', or use set_module_name"
            )
    for pattern, _ in mapping.names:
        find_names(pattern, sites)


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
      >>> from jqobs.models.assignment import bind_channels
      >>> observer = jqobs.min_max(qscheme=jqobs.per_channel_symmetric, qdtype=jqobs.qint8)
      >>> bind_channels(observer, "up/rhs", is_weight=True, ch_axis=1)
      min_max(qscheme=per_channel_symmetric, qdtype=qint8, ch_axis=1)
    """
    spec: QuantSpec | None = observer.spec
    if spec is None or not spec.qscheme.is_per_channel or spec.ch_axis is not None:
        return observer
    if not is_weight:
        raise ValueError(
            f"ch_axis must be given in {observer!r} for the activation {name}: only of a weight does the operation say "
            "which axis holds the output features"
        )
    if ch_axis is None:
        return observer.replace(qscheme=spec.per_tensor.qscheme, group_size=None)
    return observer.replace(ch_axis=ch_axis)
