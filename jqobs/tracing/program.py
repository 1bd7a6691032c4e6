"""Walks over the jaxpr of a function: finds the operands of its products, and runs it with those operands shown to a
visitor, who may replace them.

This is the only module that knows how JAX represents programs. What is looked into is listed once, in `_RULES`: a class
for each construct, which says what is known of its results (`flow`) and how it is run again (`run`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import source_info_util
from jax.extend.core import Literal, jaxprs_in_params

from jqobs.tracing.arguments import Arguments, ClosedOver, Leaf, find_closed_over, name_leaves
from jqobs.tracing.naming import Path, Unnamed, name_operations
from jqobs.tracing.products import OUTPUT_AXES, is_opaque_product

_SUPPORTED = "0.10 to 0.12"

CONSTANT, PARAMETER, ACTIVATION = range(3)
"""What a value depends on: nothing, nothing but parameters, or anything else. The join of several is the largest."""


class Fact(NamedTuple):
    """What is known of a value before anything is computed.

    Attributes:
      kind: `CONSTANT`, `PARAMETER` or `ACTIVATION`.
      leaf: The leaf that it is a view of.
      sources: The operations that it was made by, through anything that is no operation itself.
    """

    kind: int
    leaf: Leaf | None = None
    sources: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class Site:
    """An operand of a product, or its result.

    Attributes:
      name: The name of the operation and the side: `layers/3/mlp/up/lhs`.
      operation: The name of the operation.
      primitive: `dot_general`, `conv_general_dilated` or `ragged_dot_general`.
      side: `lhs`, `rhs` or `out`: those of the primitive. (`jnp.einsum` may exchange the operands that it is given.)
      is_weight: Whether it depends on parameters, or on arrays that the function closes over, and on nothing else.
      shape: Its shape where it is used; inside a scan that of one iteration.
      dtype: Its dtype.
      ch_axis: The axis of the output features, if it is a weight that has one.
      loops: The lengths of the scans around it.
      stacked: For each of these whether it is a stack of layers, with a state for every iteration.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> calibration = jqobs.observe(lambda w, x: x @ w, jqobs.min_max(), weight_argnums=0)
      >>> [site.name for site in calibration.sites(jnp.ones((3, 4)), jnp.ones((2, 3)))]
      ['w/lhs', 'w/rhs']
    """

    name: str
    operation: str
    primitive: str
    side: str
    is_weight: bool
    shape: tuple[int, ...]
    dtype: Any
    ch_axis: int | None
    loops: tuple[int, ...] = ()
    stacked: tuple[bool, ...] = ()

    @property
    def stack(self) -> tuple[int, ...]:
        """The axes in front of its state: the lengths of the scans that are stacks of layers."""
        return tuple(itertools.compress(self.loops, self.stacked))


Plan = dict[int, "_Step"]
"""What there is to do in a jaxpr, by the place of the equation; the others are bound as they are."""


@dataclasses.dataclass
class _Step:
    """An equation that is an operation, or that has operations inside."""

    operation: int | None = None  # Its place in the list of operations.
    inner: tuple[Plan, ...] = ()  # One for each jaxpr inside.
    sites: dict[str, Site] = dataclasses.field(default_factory=dict)  # Filled in when all operations are known.


class Program(NamedTuple):
    """A function that was traced.

    Attributes:
      jaxpr: Its jaxpr.
      plan: Where its sites are.
      sites: All its sites by name.
      opaque_calls: The calls that hold products and that nobody can look into.
      inputs: The leaves of its arguments that are arrays.
      outputs: The structure of its result.
    """

    jaxpr: Any
    plan: Plan
    sites: dict[str, Site]
    opaque_calls: tuple[str, ...]
    inputs: list[Any]
    outputs: Any


class Visitor(NamedTuple):
    """What is done to a program while it runs.

    Attributes:
      visit: `(site, x, memory) -> (x, memory)`: at every site with a memory; what it returns is used in place of `x`.
      stacked: For every site whether each of the scans around it has a memory of its own for every iteration.
      only_looks: Whether `visit` returns every `x` as it is. Then a function with a derivative of its own keeps its
        rule; else it is inlined, so that what is inside can be replaced.
      inlined: The names of the sites where a rule was lost.
    """

    visit: Callable[[Site, jax.Array, Any], tuple[jax.Array, Any]]
    stacked: Mapping[str, tuple[bool, ...]]
    only_looks: bool
    inlined: list[str]


def trace(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    weight_argnums: int | Sequence[int] | Callable[[str], bool] | None,
) -> Program:
    """Traces a function abstractly and finds its sites.

    Args:
      function: The function.
      args: Its arguments, or `jax.ShapeDtypeStruct`s in their place.
      kwargs: Its keyword arguments.
      weight_argnums: Which arguments are parameters: their numbers, or a predicate on the paths of leaves
        (`variables/params/Dense_0/kernel`, the name of the argument in front).

    Returns:
      The program.

    Raises:
      ValueError: `weight_argnums` of another kind, or out of range.

    Example:
      >>> import jax.numpy as jnp
      >>> from jqobs.tracing.program import trace
      >>> list(trace(lambda w, x: x @ w, (jnp.ones((3, 4)), jnp.ones((2, 3))), {}, 0).sites)
      ['w/lhs', 'w/rhs', 'w/out']
    """
    leaves = name_leaves(function, args, kwargs, weight_argnums)
    form, arrays = Arguments.split(args, kwargs)

    def call(arrays: list[Any]) -> Any:
        args, kwargs = form.restore(arrays)
        return function(*args, **kwargs)

    jaxpr, outputs = jax.make_jaxpr(call, return_shape=True)(arrays)
    facts = [Fact(PARAMETER if is_parameter else ACTIVATION, leaf) for leaf, is_parameter in leaves]
    analysis = _Analysis(find_closed_over(function))
    _, plan = analysis.flow(jaxpr, facts, (), (), record=True)
    sites, opaque_calls = analysis.finish(plan)
    return Program(jaxpr, plan, sites, opaque_calls, arrays, jax.tree.structure(outputs))


def evaluate(program: Program, visitor: Visitor, memory: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Runs a program on its inputs: its result, and the memory of each site afterwards."""
    memory = dict(memory)
    results = _run(program.jaxpr, program.plan, program.inputs, memory, visitor, depth=0)
    return jax.tree.unflatten(program.outputs, results), memory


# --- Finding the sites


class _Analysis:
    """Carries facts through a program, and lists the operations on the way."""

    def __init__(self, closed_over: ClosedOver) -> None:
        self.closed_over = closed_over
        self.operations: list[tuple[Unnamed, dict[str, Site], _Step]] = []
        self.opaque_calls: list[str] = []

    def flow(
        self,
        jaxpr: Any,
        facts: Sequence[Fact],
        scope: Path,
        loops: tuple[tuple[int, bool], ...],
        *,
        record: bool,
    ) -> tuple[list[Fact], Plan]:
        """The facts of the results of a jaxpr, and with `record` its plan."""
        inner, constants = _open(jaxpr)
        known = dict(zip(inner.constvars, map(self.fact_of_constant, constants), strict=True))
        known.update(zip(inner.invars, facts, strict=True))
        plan: Plan = {}
        for place, eqn in enumerate(inner.eqns):
            given = [self.fact_of_constant(v.val) if isinstance(v, Literal) else known[v] for v in eqn.invars]
            around = scope + tuple(
                part.name for part in eqn.source_info.name_stack.stack if type(part).__name__ == "Scope"
            )
            into = _RULES.get(eqn.primitive.name)
            kind = max((fact.kind for fact in given), default=CONSTANT)
            sources: frozenset[int] = frozenset().union(*(fact.sources for fact in given))
            results = [Fact(kind, None, sources)] * len(eqn.outvars)
            if eqn.primitive.name in OUTPUT_AXES:
                if record and (step := self.operation(eqn, given, around, loops)):
                    plan[place] = step
                    results = [Fact(kind, None, frozenset([len(self.operations) - 1]))]
            elif into is not None:
                results, plans = into.flow(self, eqn, given, around, loops, record)
                if any(plans):
                    plan[place] = _Step(inner=tuple(plans))
            elif _holds_product(eqn):
                self.opaque_calls += ["/".join((*around, eqn.primitive.name))] * record
            else:
                results = [Fact(kind, _made_of(given), sources)] * len(eqn.outvars)
            known.update(zip(eqn.outvars, results, strict=True))
        out = [self.fact_of_constant(v.val) if isinstance(v, Literal) else known[v] for v in inner.outvars]
        return out, plan

    def fact_of_constant(self, value: Any) -> Fact:
        """Arrays that the function closes over are parameters; numbers are not."""
        if not np.ndim(value):
            return Fact(CONSTANT)
        return Fact(PARAMETER, self.closed_over.arrays.get(id(value)))

    def operation(self, eqn: Any, given: Sequence[Fact], scope: Path, loops: tuple[Any, ...]) -> _Step | None:
        """Lists an operation. Its sites have no name yet: that depends on all the others."""
        left, right = given[:2]
        leaves = [fact.leaf for fact in (right, left) if fact.leaf is not None and (fact.leaf.rank or not scope)]
        # By convention parameters are the first argument. Which they really are does not count, since a simulation of
        # the same function is not told.
        leaf = max(leaves, key=lambda leaf: (leaf.rank, -leaf.argument if leaf.rank == 2 else 0), default=None)
        unnamed = Unnamed(
            primitive=eqn.primitive.name,
            scope=scope,
            leaf=None if leaf is None else leaf.path,
            sources=tuple(sorted(left.sources | right.sources)),
        )
        sites = {}
        for side, var, fact in zip(
            ("lhs", "rhs", "out"), (*eqn.invars[:2], *eqn.outvars), (*given[:2], None), strict=True
        ):
            dtype = var.aval.dtype
            if not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
                continue
            is_weight = fact is not None and fact.kind <= PARAMETER
            sites[side] = Site(
                name="",
                operation="",
                primitive=eqn.primitive.name,
                side=side,
                is_weight=is_weight,
                shape=tuple(var.aval.shape),
                dtype=dtype,
                ch_axis=OUTPUT_AXES[eqn.primitive.name](eqn.params, side, var.aval.ndim) if is_weight else None,
                loops=tuple(length for length, _ in loops),
                stacked=tuple(is_stack for _, is_stack in loops),
            )
        if not sites:
            return None
        step = _Step(operation=len(self.operations))
        self.operations.append((unnamed, sites, step))
        return step

    def finish(self, plan: Plan) -> tuple[dict[str, Site], tuple[str, ...]]:
        """Names the sites, and tells every step which are inside."""
        every = {}
        for (_, sites, step), operation in zip(
            self.operations,
            name_operations([unnamed for unnamed, _, _ in self.operations], self.closed_over.models),
            strict=True,
        ):
            for side, site in sites.items():
                name = f"{operation}/{side}"
                step.sites[side] = every[name] = dataclasses.replace(site, name=name, operation=operation)
        _gather(plan)
        return every, tuple(dict.fromkeys(self.opaque_calls))


def _made_of(facts: Sequence[Fact]) -> Leaf | None:
    """The leaf that a value shows, in another form or together with others of the same tree."""
    shown = [fact.leaf for fact in facts if fact.kind != CONSTANT]
    return functools.reduce(lambda a, b: None if a is None or b is None else a.beside(b), shown) if shown else None


def _gather(plan: Plan) -> list[Site]:
    for step in plan.values():
        for inner in step.inner:
            step.sites.update({site.name: site for site in _gather(inner)})
    return [site for step in plan.values() for site in step.sites.values()]


def _holds_product(eqn: Any) -> bool:
    if eqn.primitive.name in OUTPUT_AXES or is_opaque_product(eqn.primitive.name):
        return True
    return any(_holds_product(inner) for jaxpr in jaxprs_in_params(eqn.params) for inner in _open(jaxpr)[0].eqns)


# --- Running


def _run(
    jaxpr: Any,
    plan: Plan,
    values: Sequence[Any],
    memory: dict[str, Any],
    visitor: Visitor,
    depth: int,
    *,
    aside: bool = False,
) -> list[Any]:
    """Evaluates a jaxpr equation by equation, and updates `memory` in place. What has no result has an effect, and is
    left out `aside`, where something is computed a second time only to be looked at.
    """
    inner, constants = _open(jaxpr)
    known = dict(zip(inner.constvars, constants, strict=True))
    known.update(zip(inner.invars, values, strict=True))
    last = {v: place for place, eqn in enumerate(inner.eqns) for v in eqn.invars if not isinstance(v, Literal)}
    kept = {v for v in inner.outvars if not isinstance(v, Literal)}
    for place, eqn in enumerate(inner.eqns):
        given = [v.val if isinstance(v, Literal) else known[v] for v in eqn.invars]
        if aside and not eqn.outvars:
            continue
        step = plan.get(place)
        if aside and step is None and eqn.effects and eqn.primitive.name in _RULES:
            # Has an effect inside, that is to be left out.
            step = _Step(inner=({},) * max(2, len(eqn.params.get("branches", ()))))
            with _context(eqn):
                results, _ = _RULES[eqn.primitive.name].run(_Call(eqn, step, {}, visitor, depth, aside), given)
            known.update(zip(eqn.outvars, results, strict=True))
            continue
        sites = {} if step is None else {key: site for key, site in step.sites.items() if site.name in memory}
        if step is None or not sites:
            results = _bind(eqn, given)
        elif step.operation is not None:
            results = _operate(eqn, given, sites, memory, visitor)
        else:
            # What has to keep its own rule or its own program is bound as it is, and looked at aside.
            into = _RULES[eqn.primitive.name]
            beside = visitor.only_looks and into.is_opaque(eqn)
            part = {name: memory[name] for name in sites}
            call = _Call(eqn, step, part, visitor, depth, aside or beside)
            with _context(eqn):
                results, part = into.run(call, [*map(jax.lax.stop_gradient, given)] if beside else given)
            if beside:
                results = _bind(eqn, given)
            memory.update(part)
        known.update(zip(eqn.outvars, results, strict=True))
        for v in {v for v in eqn.invars if not isinstance(v, Literal)} - kept:
            if last[v] == place:  # Let go of what is not needed any more: eagerly this is memory.
                known.pop(v, None)
    return [v.val if isinstance(v, Literal) else known[v] for v in inner.outvars]


def _operate(eqn: Any, given: list[Any], sites: Mapping[str, Site], memory: dict[str, Any], visitor: Visitor) -> list:
    for place, side in enumerate(("lhs", "rhs")):
        if side in sites:
            name = sites[side].name
            given[place], memory[name] = visitor.visit(sites[side], given[place], memory[name])
    (result,) = _bind(eqn, given)
    if "out" in sites:
        name = sites["out"].name
        result, memory[name] = visitor.visit(sites["out"], result, memory[name])
    return [result]


def _bind(eqn: Any, values: Sequence[Any]) -> list[Any]:
    with _context(eqn), eqn.ctx.manager:
        result = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(result) if eqn.primitive.multiple_results else [result]


def _context(eqn: Any) -> Any:
    """Names for profilers, and the line of the user for errors."""
    info = eqn.source_info
    stack = source_info_util.current_name_stack() + info.name_stack
    return source_info_util.user_context(info.traceback, name_stack=stack)


class _Call(NamedTuple):
    """An equation with sites inside, and what it takes to run it."""

    eqn: Any
    step: _Step
    memory: dict[str, Any]
    visitor: Visitor
    depth: int  # How many scans are around it.
    aside: bool

    def inside(self, jaxpr: Any, which: int = 0, *, deeper: int = 0, aside: bool = False) -> Callable[..., Any]:
        """The jaxpr as a function `(memory, *values) -> (results, memory)`."""

        def function(memory: Mapping[str, Any], *values: Any) -> tuple[list[Any], dict[str, Any]]:
            after = dict(memory)
            results = _run(
                jaxpr,
                self.step.inner[which],
                values,
                after,
                self.visitor,
                self.depth + deeper,
                aside=aside or self.aside,
            )
            return results, after

        return function


# --- What is looked into


class _Inline:
    """A call: what is inside runs in its place. The compiler would inline it too."""

    is_opaque = staticmethod(lambda eqn: False)

    @staticmethod
    def jaxpr(eqn: Any) -> Any:
        for name in ("jaxpr", "call_jaxpr"):
            if name in eqn.params:
                return eqn.params[name]
        raise _unknown_layout(eqn)

    @classmethod
    def flow(cls, analysis: _Analysis, eqn: Any, given: Sequence[Fact], scope: Path, loops: Any, record: bool) -> Any:
        results, plan = analysis.flow(cls.jaxpr(eqn), given, scope, loops, record=record)
        return results, [plan]

    @classmethod
    def run(cls, call: _Call, given: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        # A nested jit may say where its arguments and its results lie; else this is free.
        given = _constrain(given, call.eqn.params.get("in_shardings", ()))
        results, memory = call.inside(cls.jaxpr(call.eqn))(call.memory, *given)
        return _constrain(results, call.eqn.params.get("out_shardings", ())), memory


def _constrain(values: list[Any], shardings: Sequence[Any]) -> list[Any]:
    return [
        jax.lax.with_sharding_constraint(value, sharding) if isinstance(sharding, jax.sharding.Sharding) else value
        for value, sharding in itertools.zip_longest(values, shardings[: len(values)])
    ]


class _Remat(_Inline):
    """`jax.checkpoint`, around the same with a memory."""

    @classmethod
    def run(cls, call: _Call, given: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        prevent_cse, policy = call.eqn.params["prevent_cse"], call.eqn.params["policy"]
        if call.eqn.params["differentiated"] and np.any(prevent_cse):
            given = list(jax.lax.optimization_barrier(given))
        prevent_cse = (False, *prevent_cse) if isinstance(prevent_cse, tuple) else prevent_cse
        inside = call.inside(cls.jaxpr(call.eqn))
        return jax.checkpoint(inside, prevent_cse=prevent_cse, policy=policy)(call.memory, *given)


class _CustomRule(_Inline):
    """A function with a derivative of its own."""

    # What talks to the world must do so once: then its rule has to go.
    is_opaque = staticmethod(lambda eqn: not any("IO" in type(effect).__name__ for effect in eqn.effects))

    @classmethod
    def run(cls, call: _Call, given: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        if not call.visitor.only_looks:
            call.visitor.inlined.extend(call.memory)
        return super().run(call, given)


def _is_tiny(jaxpr: Any) -> bool:
    """Whether XLA may compile a loop with such a body as one function. On the CPU it does so with bodies that touch
    less than about 1 KiB, with other roundings; with a statistic in it the loop would be larger.
    """
    atoms = [v for eqn in _open(jaxpr)[0].eqns for v in (*eqn.invars, *eqn.outvars)]
    shaped = [v.aval for v in atoms if hasattr(v.aval, "shape") and hasattr(v.aval.dtype, "itemsize")]
    return sum(aval.size * aval.dtype.itemsize for aval in shaped) < 4096


class _Scan:
    """`jax.lax.scan`. One whose slices hold parameters is a stack of layers: a memory for every iteration."""

    is_opaque = staticmethod(lambda eqn: not eqn.effects and _is_tiny(eqn.params["jaxpr"]))

    @staticmethod
    def parts(eqn: Any) -> tuple[int, int]:
        """How many of the inputs are constants, and how many are the carry."""
        params = eqn.params
        if "num_consts" in params and "num_carry" in params:
            return params["num_consts"], params["num_carry"]
        if "ft_in" in params:
            constants, carry, _ = params["ft_in"].unpack()
            return len(constants), len(carry)
        raise _unknown_layout(eqn)

    @classmethod
    def flow(cls, analysis: _Analysis, eqn: Any, given: Sequence[Fact], scope: Path, loops: Any, record: bool) -> Any:
        constants, carry = cls.parts(eqn)
        jaxpr, length = eqn.params["jaxpr"], eqn.params["length"]
        fixed, slices = list(given[:constants]), list(given[constants + carry :])
        avals = [v.aval for v in eqn.invars[constants + carry :]]
        is_stack = any(
            fact.kind == PARAMETER and jnp.issubdtype(aval.dtype, jnp.inexact)
            for fact, aval in zip(slices, avals, strict=True)
        )
        inside = (*loops, (length, is_stack))

        def body(moving: Sequence[Fact], record: bool) -> tuple[list[Fact], Plan]:
            return analysis.flow(jaxpr, [*fixed, *moving, *slices], scope, inside, record=record)

        moving = _fixpoint(given[constants : constants + carry], lambda moving: body(moving, False)[0][:carry])
        results, plan = body(moving, record)
        return [*moving, *results[carry:]], [plan]

    @classmethod
    def run(cls, call: _Call, given: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        params = call.eqn.params
        constants, carry = cls.parts(call.eqn)
        fixed, moving, slices = given[:constants], given[constants : constants + carry], given[constants + carry :]
        inside = call.inside(params["jaxpr"], deeper=1)
        stack = {name for name in call.memory if call.visitor.stacked[name][call.depth]}
        stacked = {name: memory for name, memory in call.memory.items() if name in stack}
        merged = {name: memory for name, memory in call.memory.items() if name not in stack}

        def body(carried: Any, sliced: Any) -> Any:
            (moving, merged), (slices, stacked) = carried, sliced
            results, memory = inside({**merged, **stacked}, *fixed, *moving, *slices)
            merged, stacked = ({name: memory[name] for name in part} for part in (merged, stacked))
            return (results[:carry], merged), (results[carry:], stacked)

        (moving, merged), (collected, stacked) = jax.lax.scan(
            body,
            (moving, merged),
            (slices, stacked),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*moving, *collected], {**merged, **stacked}


class _While:
    """`jax.lax.while_loop`: the memory is in the carry. A product in the condition is looked at beside the body."""

    is_opaque = staticmethod(lambda eqn: not eqn.effects and _is_tiny(eqn.params["body_jaxpr"]))

    @staticmethod
    def parts(eqn: Any, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Constants of the condition, constants of the body, the carry."""
        try:
            tested, looped = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        except KeyError:
            raise _unknown_layout(eqn) from None
        return list(values[:tested]), list(values[tested : tested + looped]), list(values[tested + looped :])

    @classmethod
    def flow(cls, analysis: _Analysis, eqn: Any, given: Sequence[Fact], scope: Path, loops: Any, record: bool) -> Any:
        tested, looped, moving = cls.parts(eqn, given)

        def body(moving: Sequence[Fact], record: bool) -> tuple[list[Fact], Plan]:
            return analysis.flow(eqn.params["body_jaxpr"], [*looped, *moving], scope, loops, record=record)

        moving = _fixpoint(moving, lambda moving: body(moving, False)[0])
        _, test = analysis.flow(eqn.params["cond_jaxpr"], [*tested, *moving], scope, loops, record=record)
        _, plan = body(moving, record)
        return moving, [test, plan]

    @classmethod
    def run(cls, call: _Call, given: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        tested, looped, moving = cls.parts(call.eqn, given)
        test, names = call.eqn.params["cond_jaxpr"], {site.name for site in _gather(call.step.inner[0])}

        def look(memory: dict[str, Any], moving: Sequence[Any]) -> dict[str, Any]:
            return call.inside(test, 0, aside=True)(memory, *tested, *moving)[1] if names & memory.keys() else memory

        def proceeds(carried: Any) -> Any:
            # With a memory of its own, since a condition can return nothing else.
            return call.inside(test, 0)(carried[1], *tested, *carried[0])[0][0]

        def body(carried: Any) -> Any:
            moving, memory = carried
            return call.inside(call.eqn.params["body_jaxpr"], 1)(look(memory, moving), *looped, *moving)

        moving, memory = jax.lax.while_loop(proceeds, body, (moving, call.memory))
        return moving, look(memory, moving)


class _Cond:
    """`jax.lax.cond` and `switch`: every branch returns the memory of all of them."""

    is_opaque = staticmethod(lambda eqn: False)

    @staticmethod
    def flow(analysis: _Analysis, eqn: Any, given: Sequence[Fact], scope: Path, loops: Any, record: bool) -> Any:
        branches = [analysis.flow(branch, given[1:], scope, loops, record=record) for branch in eqn.params["branches"]]
        # Which branch was taken is part of what a result depends on.
        return [_join(given[0], *facts) for facts in zip(*(facts for facts, _ in branches), strict=True)], [
            plan for _, plan in branches
        ]

    @staticmethod
    def run(call: _Call, given: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        branches = [call.inside(branch, which) for which, branch in enumerate(call.eqn.params["branches"])]
        platforms = call.eqn.params.get("branches_platforms")
        if platforms is None:
            return jax.lax.switch(given[0], branches, call.memory, *given[1:])
        choices = list(zip(platforms, branches, strict=True))
        by_platform = {name: branch for names, branch in choices if names for name in names}
        default = next((branch for names, branch in choices if names is None), None)
        return jax.lax.platform_dependent(call.memory, *given[1:], default=default, **by_platform)


def _fixpoint(moving: Sequence[Fact], body: Callable[[Sequence[Fact]], Sequence[Fact]]) -> list[Fact]:
    """The facts of a carry that hold in every iteration."""
    moving = [Fact(fact.kind) for fact in moving]
    while True:
        after = [Fact(max(old.kind, new.kind)) for old, new in zip(moving, body(moving), strict=True)]
        if after == moving:
            return moving
        moving = after


def _join(*facts: Fact) -> Fact:
    return Fact(max(fact.kind for fact in facts), None, frozenset().union(*(fact.sources for fact in facts)))


_RULES: dict[str, Any] = {
    "jit": _Inline,
    "call": _Inline,  # Until jax 0.11, with the next; then `eval_jaxpr` in place of both.
    "closed_call": _Inline,
    "eval_jaxpr": _Inline,
    "remat2": _Remat,
    "custom_jvp_call": _CustomRule,
    "custom_vjp_call": _CustomRule,
    "scan": _Scan,
    "while": _While,
    "cond": _Cond,
}


def _open(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr and its constants. They were two things until jax 0.11, and are one since."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    if not all(hasattr(inner, name) for name in ("constvars", "invars", "eqns", "outvars")):
        raise _unknown_layout(jaxpr)
    return inner, getattr(jaxpr, "consts", ())


def _unknown_layout(what: Any) -> NotImplementedError:
    params = sorted(getattr(what, "params", {}))
    shown = f"the equation {what.primitive.name} with parameters {', '.join(params)}" if params else type(what).__name__
    return NotImplementedError(
        f"jqobs reads the programs of jax {_SUPPORTED}; this is jax {jax.__version__}, and {shown} is not among them"
    )
