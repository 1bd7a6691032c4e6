"""What rules do with bins: `edges` `[bins + 1]` that ascend, and `counts` `[bins]` spread evenly between them."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def mean_errors(edges: jax.Array, code: jax.Array, error: jax.Array, step: jax.Array) -> jax.Array:
    """The mean squared error of the values of each bin, on cells of width `step`.

    Args:
      edges: `[bins + 1]`.
      code: The number of the cell of each edge, `[bins + 1]`.
      error: The distance of each edge from the value of its cell, `[bins + 1]`.
      step: The width of a cell.

    Returns:
      `[bins]`. Inside one cell it is the mean of `a^2`, `a b` and `b^2` for the errors `a`, `b` of the two edges:
      nothing cancels, and a bin of zero width is a point. Over more cells it is the difference of `k step^3 / 12 +
      error^3 / 3`, the integral of the squared error, over the width.

    Example:
      >>> import jax.numpy as jnp
      >>> from jqobs.range_rules._bins import mean_errors
      >>> edges = jnp.array([0.0, 0.25, 0.25, 1.0])
      >>> code = jnp.round(edges)
      >>> [round(error, 4) for error in mean_errors(edges, code, edges - code, 1.0).tolist()]
      [0.0208, 0.0625, 0.1042]
    """
    a, b = error[:-1], error[1:]
    width, crossed = edges[1:] - edges[:-1], code[1:] - code[:-1]
    across = (crossed * step**3 / 12 + (b**3 - a**3) / 3) / jnp.where(width > 0, width, 1.0)
    return jnp.where(crossed == 0, (a * a + a * b + b * b) / 3, across)


def mass_between(edges: jax.Array, counts: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """How many values lie in `low..high`, both included.

    Example:
      >>> import jax.numpy as jnp
      >>> from jqobs.range_rules._bins import mass_between
      >>> mass_between(jnp.array([0.0, 1.0, 3.0]), jnp.array([4.0, 8.0]), 0.5, 2.0).item()
      6.0
    """
    left, right = edges[:-1], edges[1:]
    width = right - left
    part = jnp.clip((jnp.minimum(right, high) - jnp.maximum(left, low)) / jnp.where(width > 0, width, 1.0), 0, 1)
    return jnp.sum(counts * jnp.where(width > 0, part, jnp.where((left >= low) & (left <= high), 1.0, 0.0)))


def thinned(edges: jax.Array, counts: jax.Array, times: int) -> tuple[jax.Array, jax.Array]:
    """The same values in bins of which each is `times` old ones.

    Example:
      >>> import jax.numpy as jnp
      >>> from jqobs.range_rules._bins import thinned
      >>> [part.tolist() for part in thinned(jnp.arange(4.0), jnp.array([1.0, 2.0, 3.0]), 2)]
      [[0.0, 2.0, 3.0], [3.0, 3.0]]
    """
    missing = -counts.size % times
    edges = jnp.concatenate([edges, jnp.broadcast_to(edges[-1], (missing,))])
    return edges[::times], jnp.sum(jnp.pad(counts, (0, missing)).reshape(-1, times), axis=1)


def evened(edges: jax.Array, counts: jax.Array, bins: int) -> tuple[jax.Array, jax.Array]:
    """The same values in bins of equal width.

    Example:
      >>> import jax.numpy as jnp
      >>> from jqobs.range_rules._bins import evened
      >>> evened(jnp.array([0.0, 0.0, 3.0, 4.0]), jnp.array([5.0, 6.0, 2.0]), 2)[1].tolist()
      [9.0, 4.0]
    """
    places = jnp.linspace(edges[0], edges[-1], bins + 1)
    below = jnp.interp(places, edges, jnp.concatenate([jnp.zeros(1, jnp.float32), jnp.cumsum(counts)]))
    return places, jnp.diff(below.at[0].set(0.0))
