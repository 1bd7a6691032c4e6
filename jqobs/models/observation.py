"""Calibrating functions that nobody edited: `observe`."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jqobs.models.assignment import Assignment, assign_observers
from jqobs.models.qconfig import QConfig
from jqobs.models.share import Patterns, as_patterns, resolve_groups
from jqobs.models.sites import Sites
from jqobs.models.state import ModelState, check_model_state, empty_state
from jqobs.observers.observer import State
from jqobs.quantization.qparams import QParams
from jqobs.sharding.array_types import pvary_like
from jqobs.tracing.arguments import Arguments, name_leaves
from jqobs.tracing.compilation import Step, compiled_unless_traced
from jqobs.tracing.program import Program, Site, Visitor, evaluate, trace


def observe(
    fn: Callable[..., Any],
    observers: Any,
    *,
    weight_argnums: int | Sequence[int] | Callable[[str], bool] | None = None,
    share: str | Sequence[str | Sequence[str]] | None = None,
    mask: Callable[..., Any] | None = None,
) -> Calibration:
    """Watches the operands of every product inside a function, which stays as it is.

    A site is an operand of a `dot_general`, `conv_general_dilated` or `ragged_dot_general`, wherever it lies: inside
    `jit`, `scan`, `while_loop`, `cond`, `checkpoint`, functions with a derivative of their own, `vmap`, a Flax layer. A
    scan whose slices hold floating parameters is a stack of layers and has a state for each; any other carries one
    state. Inside `shard_map` and `pallas_call` nothing is seen, and `sites` says so.

    Args:
      fn: A function of arrays and pytrees of arrays, that `jax.jit` could compile. Flags, strings and None among its
        arguments are part of the program.
      observers: What watches: an Observer for every operand, a `QConfig`, or an ordered mapping from patterns over the
        names of sites or operations to either; None leaves a site alone.
      weight_argnums: Which arguments hold weights: their numbers, or a predicate on the paths of their leaves, such as
        `variables/params/Dense_0/kernel`. Arrays that `fn` closes over are weights anyway.
      share: Patterns over the names of sites, or tuples of patterns: the sites that one of them matches get one range.
        Each keeps its own state; they are merged when they are read.
      mask: `(site, *args) -> mask or None`: for each activation, of the shape that `site.shape` tells, a mask as
        `observer.update` takes it: false at what was never there, such as padding.

    Returns:
      A `Calibration`: `init`, `update`, `merge`, `calculate_qparams` and `sites`.

    Raises:
      ValueError: On tracing: a pattern that matches no site, an activation whose per-channel observer has no `ch_axis`,
        a group that cannot be merged, a mask of another shape.

    Example:
      >>> import jax, jax.numpy as jnp, jqobs
      >>> def mlp(params, x):
      ...     return jax.nn.relu(x @ params["up"]) @ params["down"]
      >>> params, x = {"up": jnp.ones((3, 8)), "down": jnp.ones((8, 2))}, jnp.ones((4, 3))
      >>> weight = jqobs.min_max(qscheme=jqobs.per_channel_symmetric, qdtype=jqobs.qint8)
      >>> calibration = jqobs.observe(mlp, jqobs.QConfig(jqobs.log_histogram(), weight), weight_argnums=0)
      >>> state = jqobs.calibrate(calibration, [(params, x), (params, 2 * x)])
      >>> qparams = calibration.calculate_qparams(state)
      >>> {name: each.scale.shape for name, each in qparams.items()}
      {'up/lhs': (), 'up/rhs': (8,), 'down/lhs': (), 'down/rhs': (2,)}
    """
    if not callable(fn):
        raise ValueError(f"fn must be a function; got {fn!r}")
    if mask is not None and not callable(mask):
        raise ValueError(f"mask must be a function (site, *args) -> mask or None; got {mask!r}")
    return Calibration(fn, observers, weight_argnums, as_patterns(share), mask)


@dataclasses.dataclass(frozen=True, eq=False)
class Calibration:
    """A function under observation; made by `jqobs.observe`, which says what its parts are.

    It has the functions of an Observer over the state of a whole model, a `ModelState`. It remembers nothing: what a
    state is of, the state says itself.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> calibration = jqobs.observe(lambda w, x: x @ w, jqobs.min_max(), weight_argnums=0)
      >>> print(calibration.sites(jnp.ones((3, 4)), jnp.ones((2, 3))))
      site   primitive    side  kind        shape   dtype    ch_axis
      w/lhs  dot_general  lhs   activation  (2, 3)  float32        -
      w/rhs  dot_general  rhs   weight      (3, 4)  float32        1
    """

    fn: Callable[..., Any]
    observers: Any
    weight_argnums: Any
    groups: Patterns
    mask: Callable[..., Any] | None

    def sites(self, *args: Any, **kwargs: Any) -> Sites:
        """The sites of the function for arguments like these, or `jax.ShapeDtypeStruct`s; printed, they are a table."""
        assignment = self._assign(self._trace(args, kwargs))
        _warn_without_sites(self.fn, assignment.sites)
        listed = [site for site in assignment.sites if site.side != "out" or site.name in assignment.observers]
        return dataclasses.replace(assignment.sites, all=tuple(listed))

    def init(self, *args: Any, **kwargs: Any) -> ModelState:
        """The state that stands for no data; of the arguments only shapes and dtypes are read."""
        assignment = self._assign(self._trace(args, kwargs))
        _warn_without_sites(self.fn, assignment.sites)
        return empty_state(assignment)

    def update(self, state: ModelState, *args: Any, **kwargs: Any) -> tuple[Any, ModelState]:
        """Calls the function on a batch: its result, with the bits of `jax.jit(fn)`, and the state after the batch.

        Raises:
          ValueError: The state lacks a site of this call (the states of two variants of a function are put together by
            `|`), or was made with other observers.
        """
        return self._run(check_model_state(state), args, kwargs)

    def merge(self, a: ModelState, b: ModelState) -> ModelState:
        """The state of two streams together: `a.merge(b)`."""
        return check_model_state(a).merge(b)

    def calculate_qparams(self, state: ModelState, observers: Any = None) -> dict[str, QParams]:
        """The scale and zero point of every site that saw data: `state.calculate_qparams(observers)`."""
        return check_model_state(state).calculate_qparams(observers)

    def find_parameters(self, *args: Any) -> Any:
        """A tree of flags like the arguments: which of their leaves hold weights."""
        form, _ = Arguments.split(args, {})
        flags = [is_parameter for _, is_parameter in name_leaves(self.fn, args, {}, self.weight_argnums)]
        return jax.tree.map(lambda flag: flag is True, form.restore(flags)[0])

    @functools.cached_property
    def _run(self) -> Step:
        return compiled_unless_traced(self._step)

    def _step(self, state: ModelState, args: Any, kwargs: Any) -> tuple[Any, ModelState]:
        program = self._trace(args, kwargs)
        # A pattern may be for what another call has shown: the function may depend on flags.
        assignment = self._assign(program, earlier=state.sites)
        called = {name: observer for name, observer in assignment.observed if name in program.sites}
        missing = sorted(called.keys() - state.keys())
        if missing:
            raise ValueError(
                f"state must hold every site of this call, and lacks {', '.join(missing)}; begin with init, "
                "for several variants of the function with init(...) | init(...)"
            )
        _check_observers(state, called)
        memory = pvary_like({name: state[name] for name in called}, program.inputs)

        def visit(site: Site, x: jax.Array, memory: State) -> tuple[jax.Array, State]:
            kept = None if self.mask is None or site.is_weight else self.mask(site, *args, **kwargs)
            try:
                return x, called[site.name].update(memory, x, mask=kept)
            except ValueError as error:
                error.add_note(f"at the site {site.name}")
                raise

        stacked = {name: program.sites[name].stacked for name in called}
        visitor = Visitor(visit, stacked, only_looks=True, inlined=[])
        out, after = evaluate(program, visitor, memory)
        return out, state.replace({**pvary_like(dict(state), program.inputs), **after})

    def _trace(self, args: Any, kwargs: Any) -> Program:
        return trace(self.fn, args, kwargs, self.weight_argnums)

    def _assign(self, program: Program, earlier: Sites = Sites(())) -> Assignment:  # noqa: B008 (frozen)
        """Which observer watches which site, of those of a call and of those that earlier calls have shown."""
        sites = {**earlier.by_name, **program.sites}
        observers = assign_observers(self.observers, sites)
        asks = isinstance(self.observers, QConfig) and self.observers.weight is not None and self.weight_argnums is None
        if asks and program.sites and not any(site.is_weight for site in program.sites.values()):
            warnings.warn("no operand is a weight; say with weight_argnums= which arguments hold them", stacklevel=4)
        return Assignment(
            Sites(tuple(sites.values()), tuple(dict.fromkeys(earlier.opaque_calls + program.opaque_calls))),
            tuple(observers.items()),
            resolve_groups(self.groups, sites, observers),
        )


def _check_observers(state: ModelState, called: Mapping[str, Any]) -> None:
    observers = state.observers
    for name, observer in called.items():
        if observers[name] != observer:
            raise ValueError(
                f"state was made with {observers[name]!r} at the site {name}, where this calibration has {observer!r}; "
                "begin with its own init. To read a state in another way, call calculate_qparams(state, observers)"
            )


def _warn_without_sites(fn: Callable[..., Any], sites: Sites) -> None:
    if sites:
        return
    within = f" outside {', '.join(sites.opaque_calls)}, which nobody can look into" if sites.opaque_calls else ""
    warnings.warn(
        f"{getattr(fn, '__name__', fn)!r} has no product (dot_general, conv_general_dilated, ragged_dot_general)"
        f"{within}: there is nothing to watch",
        stacklevel=3,
    )
