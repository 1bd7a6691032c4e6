"""What a range rule is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax

from jqobs.formats.qtypes import Grid
from jqobs.recipe import Recipe

Range = tuple[jax.Array, jax.Array]


class RangeRule(NamedTuple):
    """Says which real range of a histogram is kept: a pure function, with a recipe that prints it.

    Any function with the arguments of `choose` is a rule too. The ones of the library are built by functions decorated
    with `jqobs.factory`, which caches them by meaning and fills in the recipe.

    Attributes:
      choose: `(edges, counts, min_val, max_val, grid) -> (min_val, max_val)`. `edges` `[bins + 1]` float32 ascends from
        `min_val` to `max_val`, and `counts` `[bins]` float32 lie between them; values that are known exactly (the
        extremes, zeros) come as bins of zero width. The result is mapped onto the grid by `jqobs.calculate_qparams`.
      recipe: The function that built it and its arguments.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> def three_sigma(edges, counts, min_val, max_val, grid):
      ...     middles = (edges[:-1] + edges[1:]) / 2
      ...     mean = jnp.sum(counts * middles) / jnp.sum(counts)
      ...     sigma = jnp.sqrt(jnp.sum(counts * (middles - mean) ** 2) / jnp.sum(counts))
      ...     return jnp.maximum(min_val, mean - 3 * sigma), jnp.minimum(max_val, mean + 3 * sigma)
      >>> observer = jqobs.log_histogram(range_rule=three_sigma)
      >>> x = jnp.append(jnp.sin(jnp.arange(999.0)), 100.0)
      >>> float(observer.calculate_qparams(observer.update(observer.init(x), x)).scale) < 12 / 255
      True
    """

    choose: Callable[[jax.Array, jax.Array, jax.Array, jax.Array, Grid], Range]
    recipe: Recipe | None = None

    def __call__(
        self, edges: jax.Array, counts: jax.Array, min_val: jax.Array, max_val: jax.Array, grid: Grid
    ) -> Range:
        """The range that is kept."""
        return self.choose(edges, counts, min_val, max_val, grid)

    def __repr__(self) -> str:
        return repr(self.recipe)
