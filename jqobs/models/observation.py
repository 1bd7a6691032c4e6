"""Calibrating and simulating functions that nobody edited: `observe`, `simulate`, `sensitivity`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jqobs.formats.granularity import Granularity
from jqobs.models.qconfig import QConfig, assign_observers, bind_channels, find_sites, suggest
from jqobs.observers.observer import Observer, State
from jqobs.observers.reading import calculate_site_qparams
from jqobs.quantization.qparams import QParams
from jqobs.quantization.rounding import fake_quantize
from jqobs.reporting.progress import progress_bar
from jqobs.reporting.tables import table
from jqobs.sharding.array_types import pvary_like
from jqobs.tracing.arguments import Arguments, as_arguments, name_leaves
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
    return Calibration(fn, observers, weight_argnums, _groups(share), mask)


@dataclasses.dataclass(frozen=True, eq=False)
class Calibration:
    """A function under observation; made by `jqobs.observe`, which says what its parts are.

    It has the functions of an Observer over the state of a whole model, a dict from the name of a site to its state.

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
    groups: tuple[tuple[str, ...], ...]
    mask: Callable[..., Any] | None
    known: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)  # What tracing has found so far.

    def sites(self, *args: Any, **kwargs: Any) -> Sites:
        """The sites of the function for arguments like these, or `jax.ShapeDtypeStruct`s; printed, they are a table."""
        program, chosen = self._trace(args, kwargs)
        listed = [site for site in program.sites.values() if site.side != "out" or site.name in chosen]
        return Sites(tuple(listed), program.unseen)

    def init(self, *args: Any, **kwargs: Any) -> dict[str, State]:
        """The state that stands for no data; of the arguments only shapes and dtypes are read."""
        program, chosen = self._trace(args, kwargs)

        def empty(site: Site, observer: Observer) -> State:
            state = observer.init(jax.ShapeDtypeStruct(site.shape, site.dtype))
            stacked = site.stack
            return jax.tree.map(lambda leaf: jnp.array(jnp.broadcast_to(leaf, stacked + leaf.shape), copy=True), state)

        return {name: empty(program.sites[name], observer) for name, observer in chosen.items()}

    def update(self, state: Mapping[str, State], *args: Any, **kwargs: Any) -> tuple[Any, dict[str, State]]:
        """Calls the function on a batch: its result, with the bits of `jax.jit(fn)`, and the state after the batch."""
        return self._run(state, args, kwargs)

    def merge(self, a: Mapping[str, State], b: Mapping[str, State]) -> dict[str, State]:
        """The state of two streams together."""
        observers = self._traced("observers")
        if a.keys() != b.keys():
            raise ValueError(f"a and b must hold the same sites; only one has {', '.join(sorted(a.keys() ^ b.keys()))}")
        _check_known(a, observers)
        ordered = [name for name in a if observers[name].merge is None]
        if ordered:
            raise ValueError(
                f"cannot merge {observers[ordered[0]]!r}, whose result depends on the order of batches, at "
                f"{', '.join(ordered)}; use a statistic with a merge, or update one state with all batches"
            )
        return {name: _merge(observers[name], a[name], b[name]) for name in a}

    def calculate_qparams(self, state: Mapping[str, State], observers: Any = None) -> dict[str, QParams]:
        """The grid of every site that saw data.

        Args:
          state: The state.
          observers: What reads it, in the forms that `observe` takes, if not what collected it: another range rule,
            another type, the same statistic.

        Returns:
          `{site: QParams}`. Sites that saw nothing are left out and named in one warning, as are the calls that nobody
          can look into; placeholders and noops are left out.

        Raises:
          NotCalibratedError: No site saw anything.
          RuntimeError: Nothing was traced yet, so that nobody knows the sites.
        """
        sites: dict[str, Site] = self._traced("sites")
        chosen = self._traced("observers") if observers is None else _bind(assign_observers(observers, sites), sites)
        if observers is None:
            _check_known(state, chosen)
        chosen = {name: observer for name, observer in chosen.items() if name in state}
        states = dict(state)
        for group in self._traced("groups"):
            members = [name for name in group if name in chosen]
            if not members:
                continue
            for name in members[1:]:
                states[members[0]] = _merge(chosen[members[0]], states[members[0]], state[name])
            states.update((name, states[members[0]]) for name in members)
        unseen: tuple[str, ...] = self._traced("unseen")
        if unseen:
            warnings.warn(f"nothing was seen inside {', '.join(unseen)}; what is in there stays in float", stacklevel=2)
        return calculate_site_qparams({name: (observer, states[name]) for name, observer in chosen.items()})

    def find_parameters(self, *args: Any) -> Any:
        """A tree of flags like the arguments: which of their leaves hold weights."""
        form, _ = Arguments.split(args, {})
        flags = form.restore([is_parameter for _, is_parameter in name_leaves(self.fn, args, {}, self.weight_argnums)])[
            0
        ]
        return jax.tree.map(lambda flag: flag is True, flags)

    @functools.cached_property
    def _run(self) -> Callable[..., tuple[Any, dict[str, State]]]:
        return _compiled_unless_traced(self._step)

    def _step(self, state: dict[str, State], args: Any, kwargs: Any) -> tuple[Any, dict[str, State]]:
        if not isinstance(state, Mapping):
            raise ValueError(f"state must be a dict of states by site, such as init returns; got {state!r}")
        program, chosen = self._trace(args, kwargs)
        state = pvary_like(dict(state), program.inputs)
        missing = sorted(chosen.keys() - state.keys())
        if missing:
            raise ValueError(
                f"state must hold every site of this call, and lacks {', '.join(missing)}; begin with init"
            )

        def visit(site: Site, x: jax.Array, memory: State) -> tuple[jax.Array, State]:
            kept = None if self.mask is None or site.is_weight else self.mask(site, *args, **kwargs)
            try:
                return x, chosen[site.name].update(memory, x, mask=kept)
            except ValueError as error:
                error.add_note(f"at the site {site.name}")
                raise

        stacked = {name: program.sites[name].stacked for name in chosen}
        visitor = Visitor(visit, stacked, only_looks=True, inlined=[])
        out, after = evaluate(program, visitor, {name: state[name] for name in chosen})
        return out, {**state, **after}

    def _trace(self, args: Any, kwargs: Any) -> tuple[Program, dict[str, Observer]]:
        program = trace(self.fn, args, kwargs, self.weight_argnums)
        # A pattern may be for what another call has shown: the function may depend on flags.
        known = {**self.known.get("sites", {}), **program.sites}
        everything = _bind(assign_observers(self.observers, known), known)
        chosen = {name: observer for name, observer in everything.items() if name in program.sites}
        asks = isinstance(self.observers, QConfig) and self.observers.weight is not None and self.weight_argnums is None
        if asks and program.sites and not any(site.is_weight for site in program.sites.values()):
            warnings.warn("no operand is a weight; say with weight_argnums= which arguments hold them", stacklevel=3)
        groups = _resolve(self.groups, known, everything)
        unseen = tuple(dict.fromkeys((*self.known.get("unseen", ()), *program.unseen)))
        self.known.update(sites=known, observers=everything, groups=groups, unseen=unseen)
        return program, chosen

    def _traced(self, key: str) -> Any:
        if not self.known:
            raise RuntimeError(
                f"the sites of {getattr(self.fn, '__name__', self.fn)!r} are not known before it was traced: call "
                "calibration.sites(*args), init(*args) or update(state, *args) first"
            )
        return self.known[key]


@dataclasses.dataclass(frozen=True)
class Sites(Sequence[Site]):
    """The sites of a function, in the order of the program; printed, they are a table.

    Attributes:
      all: The sites.
      unseen: The calls that hold products and that nobody can look into.
    """

    all: tuple[Site, ...]
    unseen: tuple[str, ...] = ()

    def __getitem__(self, place: Any) -> Any:
        return self.all[place]

    def __len__(self) -> int:
        return len(self.all)

    def __str__(self) -> str:
        rows = [["site", "primitive", "side", "kind", "shape", "dtype", "ch_axis"]]
        for site in self:
            shape = " x ".join([*map(str, site.stack), str(site.shape)])
            axis = "-" if site.ch_axis is None else str(site.ch_axis)
            kind = "weight" if site.is_weight else "activation"
            rows.append([site.name, site.primitive, site.side, kind, shape, str(site.dtype), axis])
        lines = table(rows, left=6)
        return "\n".join([lines, *(f"not seen: what is inside {name}" for name in self.unseen)])


def simulate(
    fn: Callable[..., Any],
    qparams: Mapping[str, QParams],
    *,
    weight_argnums: int | Sequence[int] | Callable[[str], bool] | None = None,
) -> Callable[..., Any]:
    """The same function on the quantized grid: operands rounded by `fake_quantize` at the sites that have a grid.

    So what a grid costs is known before anything is deployed, and training with the grid in place is `jax.grad` of it:
    the gradient is straight-through.

    Args:
      fn: The function, as it was given to `observe`.
      qparams: The grids by the names of the sites; a site without one stays in float. They may be arguments of a
        function of yours, so that many sets share one program: `jax.jit(lambda qparams, *args: jqobs.simulate(fn,
        qparams)(*args))`.
      weight_argnums: As in `observe`; needed only where scans of equal length lie in one another and only some are
        stacks.

    Returns:
      A function of the same arguments. A function with a derivative of its own that has a site inside is inlined: its
      rule is lost, which a warning says.

    Raises:
      ValueError: On the first call: names that are no site of the function.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> fn = lambda w, x: x @ w
      >>> args = jnp.array([[0.3], [1.0]]), jnp.array([[1.0, 2.0]])
      >>> calibration = jqobs.observe(fn, jqobs.min_max(qdtype=jqobs.quint2), weight_argnums=0)
      >>> _, state = calibration.update(calibration.init(*args), *args)
      >>> quantized = jqobs.simulate(fn, calibration.calculate_qparams(state))
      >>> round(quantized(*args).item(), 3)  # 4/3 * 1/3 + 2 * 1 in place of 1 * 0.3 + 2 * 1
      2.444
    """
    grids = _checked_grids(fn, qparams)

    def step(state: None, args: Any, kwargs: Any) -> tuple[Any, None]:
        return _simulated(fn, grids, weight_argnums, args, kwargs, _round), state

    run = _compiled_unless_traced(step)

    @functools.wraps(fn, assigned=("__name__", "__doc__"), updated=())
    def simulated(*args: Any, **kwargs: Any) -> Any:
        return run(None, args, kwargs)[0]

    return simulated


def sensitivity(
    fn: Callable[..., Any],
    qparams: Mapping[str, QParams],
    batches: Iterable[Any],
    metric: Callable[[Any, Any], Any],
    *,
    weight_argnums: int | Sequence[int] | Callable[[str], bool] | None = None,
    progress: bool = False,
) -> dict[str, float]:
    """What each site costs: a metric with that site alone on its grid, averaged over batches.

    All sites run through one compiled function, to which the number of the site is an argument.

    Args:
      fn: The function, as it was given to `observe`.
      qparams: The grids by the names of the sites.
      batches: The batches; a tuple is splatted into arguments.
      metric: `(out, reference) -> number`: compares the result with a site on its grid with that in float.
      weight_argnums: As in `simulate`.
      progress: Whether to show a progress bar (extra `progress`).

    Returns:
      `{site: mean of the metric}`, in the order of `qparams`.

    Raises:
      ValueError: No batches, or names that are no site of the function.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> fn = lambda w, x: x @ w
      >>> args = jnp.array([[0.3], [1.0]]), jnp.array([[1.0, 2.0]])
      >>> calibration = jqobs.observe(fn, jqobs.min_max(qdtype=jqobs.quint2), weight_argnums=0)
      >>> _, state = calibration.update(calibration.init(*args), *args)
      >>> qparams = calibration.calculate_qparams(state)
      >>> cost = jqobs.sensitivity(fn, qparams, [args], lambda out, reference: jnp.abs(out - reference).max())
      >>> {name: round(each, 3) for name, each in cost.items()}
      {'w/lhs': 0.1, 'w/rhs': 0.033}
    """
    grids = _checked_grids(fn, qparams)
    names = list(grids)
    if not callable(metric):
        raise ValueError(f"metric must be a function (out, reference) -> number; got {metric!r}")

    @functools.partial(jax.jit, static_argnums=0)
    def measure(form: Arguments, chosen: jax.Array, reference: Any, arrays: list[Any]) -> jax.Array:
        def visit(site: Site, x: jax.Array, grid: QParams) -> tuple[jax.Array, QParams]:
            is_chosen = chosen == names.index(site.name)
            return jax.lax.cond(is_chosen, lambda x: _round(site, x, grid)[0], lambda x: x, x), grid

        args, kwargs = form.restore(arrays)
        value = jnp.asarray(metric(_simulated(fn, grids, weight_argnums, args, kwargs, visit), reference), jnp.float32)
        if value.shape:
            raise ValueError(f"metric must return a number; it returned an array of shape {value.shape}")
        return value

    reference_of = jax.jit(lambda form, arrays: fn(*form.restore(arrays)[0]), static_argnums=0)
    total, count = np.zeros(len(names)), 0
    for batch in batches:
        form, arrays = Arguments.split(as_arguments(batch), {})
        reference, count = reference_of(form, arrays), count + 1
        each = progress_bar(range(len(names)), f"sensitivity, batch {count}", progress=progress)
        total += [float(measure(form, jnp.int32(i), reference, arrays)) for i in each]
    if not count:
        raise ValueError(f"batches must hold at least one batch; got {batches!r}. Was a generator used up before?")
    return dict(zip(names, (total / count).tolist(), strict=True))


def _checked_grids(fn: Any, qparams: Any) -> dict[str, QParams]:
    if not callable(fn):
        raise ValueError(f"fn must be a function; got {fn!r}")
    if not isinstance(qparams, Mapping) or not all(isinstance(each, QParams) for each in qparams.values()):
        raise ValueError(f"qparams must be a dict of QParams by site, as calculate_qparams returns; got {qparams!r}")
    return dict(qparams)


def _simulated(fn: Any, grids: dict[str, QParams], weight_argnums: Any, args: Any, kwargs: Any, visit: Any) -> Any:
    program = trace(fn, args, kwargs, weight_argnums)
    unknown = [name for name in grids if name not in program.sites]
    if unknown:
        raise ValueError(
            f"qparams must be for sites of {getattr(fn, '__name__', fn)!r}; these are none: {', '.join(unknown)}. "
            + suggest(unknown[0], program.sites)
        )
    stacked = {name: _stacked(program.sites[name], grid, weight_argnums) for name, grid in grids.items()}
    visitor = Visitor(visit, stacked, only_looks=False, inlined=[])
    out, _ = evaluate(program, visitor, grids)
    if visitor.inlined:
        warnings.warn(
            "functions with a derivative of their own were inlined, and are differentiated like any other: those "
            f"around {', '.join(dict.fromkeys(visitor.inlined))}",
            stacklevel=2,
        )
    return out


def _round(site: Site, x: jax.Array, grid: QParams) -> tuple[jax.Array, QParams]:
    """Rounds an operand; integers are codes already."""
    return (fake_quantize(x, grid) if jnp.issubdtype(x.dtype, jnp.floating) else x), grid


def _stacked(site: Site, grid: QParams, weight_argnums: Any) -> tuple[bool, ...]:
    """Which of the scans around a site its grid has an axis for."""
    rank = Granularity(grid.qscheme, grid.ch_axis, grid.group_size).rank
    extra = grid.scale.shape[: max(grid.scale.ndim - rank, 0)]
    if site.stack == extra:
        return site.stacked
    fitting = [
        choice
        for choice in itertools.product((True, False), repeat=len(site.loops))
        if tuple(itertools.compress(site.loops, choice)) == extra
    ]
    if len(fitting) == 1:
        return fitting[0]
    within = f"which lies in scans of lengths {site.loops}" if site.loops else "which lies in no scan"
    hint = "; say with weight_argnums= which arguments hold weights" if fitting and weight_argnums is None else ""
    raise ValueError(
        f"qparams[{site.name!r}] has a scale of shape {grid.scale.shape}, of which the axes {extra} in front must be "
        f"those of the stacks of layers around the site, {within}{hint}"
    )


def _compiled_unless_traced(step: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """A function `(state, args, kwargs) -> (out, state)` that is compiled when it is called with arrays.

    Inside a program that is being traced it is a part of that: nothing is kept of it.
    """

    @functools.partial(jax.jit, static_argnums=0)
    def compiled(form: Arguments, state: Any, arrays: list[Any]) -> tuple[Any, Any]:
        return step(state, *form.restore(arrays))

    def run(state: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        form, arrays = Arguments.split(args, kwargs)
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((state, arrays))):
            return step(state, args, kwargs)
        return compiled(form, state, arrays)

    return run


def _bind(chosen: Mapping[str, Observer], sites: Mapping[str, Site]) -> dict[str, Observer]:
    def bound(site: Site, observer: Observer) -> Observer:
        return bind_channels(observer, site.name, is_weight=site.is_weight, ch_axis=site.ch_axis)

    return {name: bound(sites[name], observer) for name, observer in chosen.items()}


def _merge(observer: Observer, a: State, b: State) -> State:
    assert observer.merge is not None  # Who asks has checked.
    return observer.merge(a, b)


def _groups(share: Any) -> tuple[tuple[str, ...], ...]:
    if share is None:
        return ()
    entries = [share] if isinstance(share, str) else share
    if not isinstance(entries, list | tuple) or not all(isinstance(entry, str | list | tuple) for entry in entries):
        raise ValueError(f"share must be a pattern, or a list of patterns and of tuples of patterns; got {share!r}")
    return tuple((entry,) if isinstance(entry, str) else tuple(entry) for entry in entries)


def _resolve(
    groups: Sequence[Sequence[str]], sites: Mapping[str, Site], chosen: Mapping[str, Observer]
) -> list[list[str]]:
    """The names of the observed sites in each group."""
    resolved: list[list[str]] = []
    for patterns in groups:
        matched = dict.fromkeys(itertools.chain.from_iterable(find_sites(pattern, sites) for pattern in patterns))
        members = [name for name in matched if name in chosen]
        for name in members:
            if any(name in group for group in resolved):
                raise ValueError(f"share must put a site into one group; {name} is in two")
            if chosen[name].merge is None:
                raise ValueError(
                    f"share: {chosen[name]!r} at {name} cannot be merged, since its result depends on the order of "
                    "batches; use a statistic that can, such as min_max or log_histogram"
                )
            if chosen[name] is not chosen[members[0]]:
                raise ValueError(
                    f"share: the sites of a group must have one observer; {members[0]} has {chosen[members[0]]!r} and "
                    f"{name} has {chosen[name]!r}"
                )
            if _form_of(name, sites, chosen) != _form_of(members[0], sites, chosen):
                raise ValueError(
                    f"share: the sites of a group must have states of one shape; that of {members[0]} is for "
                    f"{sites[members[0]].shape}, that of {name} for {sites[name].shape}"
                )
        resolved.append(members)
    return resolved


def _form_of(name: str, sites: Mapping[str, Site], chosen: Mapping[str, Observer]) -> Any:
    site, observer = sites[name], chosen[name]
    state = jax.eval_shape(observer.init, jax.ShapeDtypeStruct(site.shape, site.dtype))
    return site.stack, [leaf.shape for leaf in jax.tree.leaves(state)]


def _check_known(state: Mapping[str, State], observers: Mapping[str, Observer]) -> None:
    unknown = sorted(state.keys() - observers.keys())
    if unknown:
        raise ValueError(
            f"state holds sites that the function has not shown: {', '.join(unknown)}; {suggest(unknown[0], observers)}"
        )
