"""What a range rule is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jqobs.formats.quant_spec import QuantSpec
from jqobs.recipe import Recipe

Range = tuple[jax.Array, jax.Array]


class RangeRule(NamedTuple):
    """Says which real range of a histogram is kept: a pure function, with a recipe that prints it.

    Any function with the arguments of `choose` is a rule too. The ones of the library are built by functions decorated
    with `jqobs.factory`, which caches them by meaning and fills in the recipe.

    Attributes:
      choose: `(edges, counts, min_val, max_val, spec) -> (min_val, max_val)`. `edges` `[bins + 1]` float32 ascends from
        `min_val` to `max_val`, and `counts` `[bins]` float32 lie between them; values that are known exactly (the
        extremes, zeros) come as bins of zero width. The result is mapped onto the grid by `jqobs.calculate_qparams`.
      recipe: The function that built it and its arguments.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> def three_sigma(edges, counts, min_val, max_val, spec):
      ...     middles = (edges[:-1] + edges[1:]) / 2
      ...     mean = jnp.sum(counts * middles) / jnp.sum(counts)
      ...     sigma = jnp.sqrt(jnp.sum(counts * (middles - mean) ** 2) / jnp.sum(counts))
      ...     return jnp.maximum(min_val, mean - 3 * sigma), jnp.minimum(max_val, mean + 3 * sigma)
      >>> observer = jqobs.log_histogram(range_rule=three_sigma)
      >>> x = jnp.append(jnp.sin(jnp.arange(999.0)), 100.0)
      >>> float(observer.calculate_qparams(observer.update(observer.init(x), x)).scale) < 12 / 255
      True
    """

    choose: Callable[[jax.Array, jax.Array, jax.Array, jax.Array, QuantSpec], Range]
    recipe: Recipe | None = None

    def __call__(
        self, edges: jax.Array, counts: jax.Array, min_val: jax.Array, max_val: jax.Array, spec: QuantSpec
    ) -> Range:
        """The range that is kept."""
        return self.choose(edges, counts, min_val, max_val, spec)

    def __reduce__(self) -> Any:
        # A copy or a pickle is built again by the recipe, and so is the same object in the same process.
        return (RangeRule, (self.choose,)) if self.recipe is None else (Recipe.__call__, (self.recipe,))

    def __repr__(self) -> str:
        return repr(self.recipe or self.choose)


def check_rule(rule: Any) -> None:
    """Raises ValueError for what cannot choose a range.

    Example:
      >>> from jqobs.range_rules._rule import check_rule
      >>> check_rule("mse")
      Traceback (most recent call last):
      ValueError: range_rule must be a rule such as jqobs.mse(), or a function; got 'mse'
    """
    if not callable(rule):
        raise ValueError(f"range_rule must be a rule such as jqobs.mse(), or a function; got {rule!r}")
