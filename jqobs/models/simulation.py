"""What a grid costs, before anything is deployed: `simulate`."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jqobs.models.patterns import find_pattern, matches, suggest
from jqobs.quantization.qparams import QParams
from jqobs.quantization.rounding import fake_quantize
from jqobs.tracing.arguments import WeightArgnums
from jqobs.tracing.compilation import compiled_unless_traced
from jqobs.tracing.program import Program, Site, Visitor, evaluate, trace


def simulate(
    fn: Callable[..., Any],
    qparams: Mapping[str, QParams | None],
    *,
    weight_argnums: WeightArgnums = None,
) -> Callable[..., Any]:
    """The same function on the quantized grid: operands rounded by `fake_quantize` at the sites that have a grid.

    So what a grid costs is known before anything is deployed, and training with the grid in place is `jax.grad` of it:
    the gradient is straight-through.

    Args:
      fn: The function, as it was given to `observe`.
      qparams: The `QParams` by the names of sites, or by patterns over them (see `jqobs.models.patterns`); None, or
        nothing, leaves a site in float. They may be arguments of a function of yours, so that many sets share one
        program: `jax.jit(lambda qparams, *args: jqobs.simulate(fn, qparams)(*args))`.
      weight_argnums: As in `observe`; needed only where scans of equal length lie in one another and only some are
        stacks.

    Returns:
      A function of the same arguments. A function with a derivative of its own that has a site inside is inlined: its
      rule is lost, which a warning says.

    Raises:
      ValueError: On the first call: a name or pattern that matches no site of the function.

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
    qparams = check_site_qparams(fn, qparams)

    def step(state: None, args: Any, kwargs: Any) -> tuple[Any, None]:
        program = trace(fn, args, kwargs, weight_argnums)
        return run_rounded(program, find_qparams(fn, program, qparams), weight_argnums, round_operand), state

    run = compiled_unless_traced(step)

    @functools.wraps(fn, assigned=("__name__", "__doc__"), updated=())
    def simulated(*args: Any, **kwargs: Any) -> Any:
        return run(None, args, kwargs)[0]

    return simulated


def check_site_qparams(fn: Any, qparams: Any) -> dict[str, QParams | None]:
    """The arguments of `simulate` and `sensitivity`, if they are what they should be.

    Raises:
      ValueError: `fn` is no function, or `qparams` no mapping from names to `QParams`.

    Example:
      >>> from jqobs.models.simulation import check_site_qparams
      >>> check_site_qparams(abs, {"w/lhs": None})
      {'w/lhs': None}
    """
    if not callable(fn):
        raise ValueError(f"fn must be a function; got {fn!r}")
    if not isinstance(qparams, Mapping) or not all(isinstance(each, QParams | None) for each in qparams.values()):
        raise ValueError(f"qparams must be a dict of QParams by site, as calculate_qparams returns; got {qparams!r}")
    return dict(qparams)


def find_qparams(fn: Any, program: Program, qparams: Mapping[str, QParams | None]) -> dict[str, QParams]:
    """The `QParams` of every site of a program that has some.

    Raises:
      ValueError: A name or a pattern that matches no site.
    """
    sites = program.sites
    unknown = [name for name in qparams if name not in sites and not any(matches(name, site) for site in sites)]
    if unknown:
        raise ValueError(
            f"qparams must be for sites of {getattr(fn, '__name__', fn)!r}; these are none: {', '.join(unknown)}. "
            + suggest(unknown[0], sites)
        )
    for_results = {pattern: each for pattern, each in qparams.items() if pattern.endswith("out")}
    found = {name: find_pattern(name, for_results if site.side == "out" else qparams) for name, site in sites.items()}
    # In the order in which they were given: of a pattern in that of the program.
    named: dict[str, list[str]] = {pattern: [] for pattern in qparams}
    for name, pattern in found.items():
        if pattern is not None:
            named[pattern].append(name)
    return {name: each for pattern, each in qparams.items() if each is not None for name in named[pattern]}


def run_rounded(program: Program, qparams: Mapping[str, QParams], weight_argnums: WeightArgnums, visit: Any) -> Any:
    """The result of a program with `visit` at every site that has `QParams`."""
    stacked = {name: _stacked(program.sites[name], each, weight_argnums) for name, each in qparams.items()}
    visitor = Visitor(visit, stacked, only_looks=False, inlined=[])
    out, _ = evaluate(program, visitor, dict(qparams))
    if visitor.inlined:
        warnings.warn(
            "functions with a derivative of their own were inlined, and are differentiated like any other: those "
            f"around {', '.join(dict.fromkeys(visitor.inlined))}",
            stacklevel=2,
        )
    return out


def round_operand(site: Site, x: jax.Array, qparams: QParams) -> tuple[jax.Array, QParams]:
    """Rounds an operand; integers are codes already."""
    return (fake_quantize(x, qparams) if jnp.issubdtype(x.dtype, jnp.floating) else x), qparams


def _stacked(site: Site, qparams: QParams, weight_argnums: WeightArgnums) -> tuple[bool, ...]:
    """Which of the scans around a site its scale has an axis for."""
    extra = qparams.scale.shape[: max(qparams.scale.ndim - qparams.spec.rank, 0)]
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
        f"qparams[{site.name!r}] has a scale of shape {qparams.scale.shape}, of which the axes {extra} in front must "
        f"be those of the stacks of layers around the site, {within}{hint}"
    )
