"""The state of a model: one state for each site, and what is needed to read them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jqobs.models.assignment import Assignment, assign_observers
from jqobs.models.sites import Sites
from jqobs.observers.observer import Observer, State
from jqobs.observers.reading import calculate_site_qparams
from jqobs.quantization.qparams import QParams
from jqobs.tracing.program import Site


@jax.tree_util.register_pytree_with_keys_class
class ModelState(Mapping[str, State]):
    """A mapping from the names of sites to their states, that says itself what it is of.

    Attributes:
      assignment: The static part.

    Its leaves are those of the states. Its static part holds the sites, the observer of each, the groups that share a
    range and the calls that nobody can look into, so that it can be merged and read anywhere, also in a process that
    never saw the function. Made by `calibration.init`.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> calibration = jqobs.observe(lambda w, x: x @ w, jqobs.min_max(), weight_argnums=0)
      >>> args = jnp.ones((3, 4)), jnp.ones((2, 3))
      >>> _, state = calibration.update(calibration.init(*args), *args)
      >>> list(state), state["w/lhs"].max_val.item(), list(state.calculate_qparams())
      (['w/lhs', 'w/rhs'], 1.0, ['w/lhs', 'w/rhs'])
    """

    __slots__ = ("_states", "assignment")

    def __init__(self, states: Mapping[str, State], assignment: Assignment) -> None:
        self.assignment = assignment
        self._states = {name: states[name] for name in assignment.observers}

    def __getitem__(self, name: str) -> State:
        return self._states[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def __eq__(self, other: object) -> bool:
        return self is other  # That of a mapping would compare arrays.

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"ModelState({self._states!r})"

    @property
    def sites(self) -> Sites:
        """The sites of the function, the unobserved ones too, and the calls that nobody can look into."""
        return self.assignment.sites

    @property
    def observers(self) -> dict[str, Observer]:
        """The observer of every observed site."""
        return dict(self.assignment.observed)

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The names of the sites that share a range."""
        return self.assignment.groups

    def replace(self, states: Mapping[str, State]) -> ModelState:
        """The same sites with other states, such as those that another library has read from a file.

        Raises:
          ValueError: States are missing, or are of no site here.
        """
        check_same_sites("states", states, "this state", self)
        return ModelState(states, self.assignment)

    def __or__(self, other: ModelState) -> ModelState:
        """The sites of both, for a function whose flags decide what it does; where both have a state, that of `self`.

        Raises:
          ValueError: A site has another observer in each, or `other` is no ModelState.
        """
        assignment = self.assignment | check_model_state(other).assignment
        return ModelState({**other, **self}, assignment)

    def merge(self, other: ModelState) -> ModelState:
        """The state of two streams together.

        Raises:
          ValueError: The two are of different sites or observers, or one of these has no merge.
        """
        observers = self.assignment.observers
        check_same_sites("a", self, "b", other)
        ordered = [name for name in observers if observers[name].merge is None]
        if ordered:
            raise ValueError(
                f"cannot merge {observers[ordered[0]]!r}, whose result depends on the order of batches, at "
                f"{', '.join(ordered)}; use a statistic with a merge, or update one state with all batches"
            )
        if isinstance(other, ModelState):
            self.assignment.check_agrees(other.assignment)
        return ModelState({name: _merge(observers[name], self[name], other[name]) for name in self}, self.assignment)

    def calculate_qparams(self, observers: Any = None) -> dict[str, QParams]:
        """The scale and the zero point of every site that saw data.

        Args:
          observers: What reads it, in the forms that `jqobs.observe` takes, if not what collected it: another range
            rule, another type, the same statistic.

        Returns:
          `{site: QParams}`. Sites that saw nothing are left out and named in one warning, as are the calls that nobody
          can look into; placeholders and noops are left out.

        Raises:
          NotCalibratedError: No site saw anything.
        """
        chosen = self.assignment.observers
        if observers is not None:
            chosen = assign_observers(observers, self.sites.by_name)
            chosen = {name: observer for name, observer in chosen.items() if name in self}
        states = dict(self)
        for group in self.groups:
            members = [name for name in group if name in chosen]
            for name in members[1:]:
                states[members[0]] = _merge(chosen[members[0]], states[members[0]], self[name])
            states.update((name, states[members[0]]) for name in members)
        opaque_calls = self.sites.opaque_calls
        if opaque_calls:
            warnings.warn(
                f"nothing was seen inside {', '.join(opaque_calls)}; what is in there stays in float", stacklevel=3
            )
        return calculate_site_qparams({name: (observer, states[name]) for name, observer in chosen.items()})

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, State]], Assignment]:
        """For JAX."""
        return [(jax.tree_util.DictKey(name), state) for name, state in self._states.items()], self.assignment

    def tree_flatten(self) -> tuple[list[State], Assignment]:
        """For JAX."""
        return list(self._states.values()), self.assignment

    @classmethod
    def tree_unflatten(cls, assignment: Assignment, states: Any) -> ModelState:
        """For JAX."""
        return cls(dict(zip(assignment.observers, states, strict=True)), assignment)

    def __reduce__(self) -> Any:
        return ModelState, (dict(self), self.assignment)


def empty_state(assignment: Assignment) -> ModelState:
    """The state that stands for no data.

    Example:
      >>> from jqobs.models.assignment import Assignment
      >>> from jqobs.models.sites import Sites
      >>> from jqobs.models.state import empty_state
      >>> empty_state(Assignment(Sites(()), ()))
      ModelState({})
    """

    def empty(site: Site, observer: Observer) -> State:
        state = observer.init(jax.ShapeDtypeStruct(site.shape, site.dtype))
        return jax.tree.map(lambda leaf: jnp.array(jnp.broadcast_to(leaf, site.stack + leaf.shape), copy=True), state)

    sites = assignment.sites.by_name
    return ModelState({name: empty(sites[name], each) for name, each in assignment.observed}, assignment)


def check_model_state(state: Any) -> ModelState:
    """The state, if it is that of a model.

    Raises:
      ValueError: It is something else; what to write is said.

    Example:
      >>> from jqobs.models.state import check_model_state
      >>> check_model_state({})
      Traceback (most recent call last):
      ValueError: state must be a ModelState, as calibration.init and calibration.update return; got a dict, which ...
    """
    if not isinstance(state, ModelState):
        raise ValueError(
            "state must be a ModelState, as calibration.init and calibration.update return; got a "
            f"{type(state).__name__}, which does not say what its sites are. A dict becomes one by "
            "calibration.init(*args).replace(states)"
        )
    return state


def check_same_sites(name: str, a: Any, other_name: str, b: Any) -> None:
    """Raises ValueError for two mappings that do not hold the same sites.

    Example:
      >>> from jqobs.models.state import check_same_sites
      >>> check_same_sites("a", {"up/lhs": 0}, "b", {})
      Traceback (most recent call last):
      ValueError: a and b must hold the same sites; only one has up/lhs
    """
    if not isinstance(b, Mapping) or not isinstance(a, Mapping):
        raise ValueError(f"{name} and {other_name} must be mappings from sites to states; got {a!r} and {b!r}")
    differing = sorted(a.keys() ^ b.keys())
    if differing:
        raise ValueError(f"{name} and {other_name} must hold the same sites; only one has {', '.join(differing)}")


def _merge(observer: Observer, a: State, b: State) -> State:
    assert observer.merge is not None  # Who asks has checked.
    return observer.merge(a, b)
