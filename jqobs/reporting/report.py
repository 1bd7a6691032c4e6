"""Tables that a person would rather look at than arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jqobs.quantization.qparams import QParams
from jqobs.reporting.tables import table


def report(states: Any, qparams: Mapping[str, QParams] | None = None) -> str:
    """A table of what every observer of a model saw: range, counts, and the grid it came to.

    It names the layers that saw nothing and those that met NaN or infinities, which would otherwise show up as a bad
    scale in some other place.

    Args:
      states: The states by site name: a dict, nested or flat, such as `variables["observers"]` of a Linen model.
      qparams: The grids by site name, as the `calculate_qparams` of a model returns them.

    Returns:
      A table in plain text, one line a site. Of channels it shows the widest range and the smallest and largest scale.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> observer, x = jqobs.min_max(), jnp.array([-1.0, 3.0, jnp.nan])
      >>> state = observer.update(observer.init(x), x)
      >>> print(jqobs.report({"conv": state}, {"conv": observer.calculate_qparams(state)}))
      site  min  max    scale  zero_point  seen  nonfinite
      conv   -1    3  0.01569          64     2          1
    """
    qparams = qparams or {}
    rows = [["site", "min", "max", "scale", "zero_point", "seen", "nonfinite"]]
    for name, state in _flatten(states).items():
        ends = [
            _number(getattr(state, end, None), choose) for end, choose in (("min_val", np.min), ("max_val", np.max))
        ]
        counts = [_total(getattr(state, field, None)) for field in ("seen", "nonfinite")]
        grid = [_span(leaf) for leaf in qparams[name]] if name in qparams else ["-", "-"]
        rows.append([name, *ends, *grid, *counts])
    return table(rows, left=1)


def _flatten(states: Any) -> dict[str, Any]:
    """States by their path: whatever is a NamedTuple is one. The name "state" of a Flax variable is no part of a
    path.
    """
    leaves = jax.tree_util.tree_leaves_with_path(states, is_leaf=lambda node: hasattr(node, "_fields"))
    names = [([str(getattr(key, "key", key)) for key in path], state) for path, state in leaves]
    names = [(path, state) for path, state in names if path[-1:] not in (["cached_qparams"], ["flags"])]
    return {"/".join(path[:-1] if path[-1:] == ["state"] else path): state for path, state in names}


def _number(values: Any, choose: Any) -> str:
    if values is None:
        return "-"
    finite = np.asarray(values)[np.isfinite(values)]
    return f"{choose(finite):.4g}" if finite.size else "-"


def _total(counts: Any) -> str:
    return "-" if counts is None else str(np.asarray(counts).sum())


def _span(values: Any) -> str:
    low, high = np.min(values), np.max(values)
    return f"{low:.4g}" if low == high else f"{low:.4g}..{high:.4g}"
