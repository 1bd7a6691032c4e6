"""What each site of a function costs: `sensitivity`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqobs.models.simulation import check_site_qparams, find_qparams, round_operand, run_rounded
from jqobs.numerics.inputs import is_array, owned
from jqobs.quantization.qparams import QParams
from jqobs.reporting.progress import progress_bar
from jqobs.tracing.arguments import Arguments, WeightArgnums, as_arguments
from jqobs.tracing.program import Site, trace


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

    @functools.partial(jax.jit, static_argnums=0)
    def measure(form: Arguments, chosen: jax.Array, reference: Any, arrays: list[Any]) -> jax.Array:
        program = trace(fn, *form.restore(arrays), weight_argnums)
        names = list(find_qparams(fn, program, qparams))

        def visit(site: Site, x: jax.Array, each: QParams) -> tuple[jax.Array, QParams]:
            is_chosen = chosen == names.index(site.name)
            return jax.lax.cond(is_chosen, lambda x: round_operand(site, x, each)[0], lambda x: x, x), each

        out = run_rounded(program, find_qparams(fn, program, qparams), weight_argnums, visit)
        value = jnp.asarray(metric(out, reference), jnp.float32)
        if value.shape:
            raise ValueError(f"metric must return a number; it returned an array of shape {value.shape}")
        return value

    reference_of = jax.jit(lambda form, arrays: fn(*form.restore(arrays)[0]), static_argnums=0)
    names: list[str] = []
    total, count = np.zeros(0), 0
    for batch in batches:
        form, arrays = Arguments.split(as_arguments(batch), {})
        arrays = [owned(leaf) if is_array(leaf) else leaf for leaf in arrays]
        if not count:
            names = list(find_qparams(fn, trace(fn, *form.restore(arrays), weight_argnums), qparams))
            total = np.zeros(len(names))
        reference, count = reference_of(form, arrays), count + 1
        each = progress_bar(range(len(names)), f"sensitivity, batch {count}", progress=progress)
        total += [float(measure(form, jnp.int32(i), reference, arrays)) for i in each]
    if not count:
        raise ValueError(f"batches must hold at least one batch; got {batches!r}. Was a generator used up before?")
    return dict(zip(names, (total / count).tolist(), strict=True))
