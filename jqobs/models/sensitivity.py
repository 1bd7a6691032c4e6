"""What each site of a function costs: `sensitivity`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jqobs.models.simulation import check_site_qparams, find_qparams, round_operand, run_rounded
from jqobs.numerics.inputs import is_array, owned
from jqobs.quantization.qparams import QParams
from jqobs.reporting.progress import progress_bar
from jqobs.tracing.arguments import Arguments, WeightArgnums, as_arguments
from jqobs.tracing.program import Program, Site, trace


def sensitivity(
    fn: Callable[..., Any],
    qparams: Mapping[str, QParams | None],
    batches: Iterable[Any],
    metric: Callable[[Any, Any], Any],
    *,
    weight_argnums: WeightArgnums = None,
    progress: bool = False,
) -> dict[str, float]:
    """What each site costs: a metric with that site alone on its grid, averaged over batches.

    All sites run through one compiled function, to which the number of the site is an argument.

    Args:
      fn: The function, as it was given to `observe`.
      qparams: As in `simulate`.
      batches: The batches; a tuple is splatted into arguments.
      metric: `(out, reference) -> number`: compares the result with a site on its grid with that in float.
      weight_argnums: As in `simulate`.
      progress: Whether to show a progress bar (extra `progress`).

    Returns:
      `{site: mean of the metric}`, in the order of `qparams`.

    Raises:
      ValueError: No batches, or a name or pattern that matches no site of the function.

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
    qparams = check_site_qparams(fn, qparams)
    if not callable(metric):
        raise ValueError(f"metric must be a function (out, reference) -> number; got {metric!r}")

    # A batch of another form or other shapes is another program, that may have other sites.
    programs: dict[Any, tuple[list[str], Callable[..., Any], Callable[..., Any]]] = {}
    totals: dict[str, float] = {}
    count = 0
    for batch in batches:
        form, arrays = Arguments.split(as_arguments(batch), {})
        arrays = [owned(leaf) if is_array(leaf) else leaf for leaf in arrays]
        key = form, tuple(map(jax.typeof, arrays))
        if key not in programs:
            program = trace(fn, *form.restore(arrays), weight_argnums)
            programs[key] = _compiled(program, find_qparams(fn, program, qparams), metric, weight_argnums)
        names, run, measure = programs[key]
        reference, count = run(arrays), count + 1
        for place in progress_bar(range(len(names)), f"sensitivity, batch {count}", progress=progress):
            cost = float(measure(jnp.int32(place), reference, arrays))
            totals[names[place]] = totals.get(names[place], 0.0) + cost
    if not count:
        raise ValueError(f"batches must hold at least one batch; got {batches!r}. Was a generator used up before?")
    return {name: total / count for name, total in totals.items()}


def _compiled(
    program: Program, qparams: Mapping[str, QParams], metric: Callable[[Any, Any], Any], weight_argnums: WeightArgnums
) -> tuple[list[str], Callable[..., Any], Callable[..., Any]]:
    """The names of the sites, the program in float, and what one site costs: all from one trace."""
    names = list(qparams)

    @jax.jit
    def run(arrays: list[Any]) -> Any:
        return run_rounded(program._replace(inputs=arrays), {}, weight_argnums, round_operand)

    @jax.jit
    def measure(chosen: jax.Array, reference: Any, arrays: list[Any]) -> jax.Array:
        def visit(site: Site, x: jax.Array, each: QParams) -> tuple[jax.Array, QParams]:
            is_chosen = chosen == names.index(site.name)
            return jax.lax.cond(is_chosen, lambda x: round_operand(site, x, each)[0], lambda x: x, x), each

        out = run_rounded(program._replace(inputs=arrays), qparams, weight_argnums, visit)
        value = jnp.asarray(metric(out, reference), jnp.float32)
        if value.shape:
            raise ValueError(f"metric must return a number; it returned an array of shape {value.shape}")
        return value

    return names, run, measure
