"""What the catalogue is written in: a statistic of one group of values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jqobs.formats.quant_spec import QuantSpec

State = Any  # A NamedTuple of arrays; each statistic has its own.


class Chunk(NamedTuple):
    """A batch of one group of values, or a chunk of it, as a statistic is shown it.

    Attributes:
      x: float32 of any shape.
      where: Booleans of the same shape; what they exclude may be NaN or infinite.
      min_val: The smallest of the values at `where`, or +inf; of the whole batch for a statistic with `extend_range`.
      max_val: The largest of the values at `where`, or -inf; likewise.

    Example:
      >>> import jax.numpy as jnp
      >>> from jqobs.observers.statistic import Chunk
      >>> x = jnp.array([1.0, 2.0])
      >>> Chunk(x=x, where=x > 0, min_val=x.min(), max_val=x.max()).max_val.item()
      2.0
    """

    x: jax.Array
    where: jax.Array
    min_val: jax.Array
    max_val: jax.Array


class Statistic(NamedTuple):
    """What is remembered of one group of values; `jqobs.lift` makes an Observer of it.

    A statistic knows nothing of channels, groups, codes, masks or devices. Its states and summaries are NamedTuples
    that share the fields `seen` and `nonfinite` (a `Count` each): the statistic declares and may read them, and the
    lifting fills them in. The functions are traced, and mapped over channels and groups by `jax.vmap`.

    Attributes:
      name: The name in error messages: the factory's.
      init: `() -> state`: nothing seen. With float32 leaves where a value is remembered.
      summarize: `(chunk, state) -> summary`: one batch of one group, or a chunk of it (see `Chunk`). Few statistics
        look at `state`.
      reduce: `(summary, summary) -> summary`: two chunks of the same batch.
      fold: `(state, summary) -> state`: the next batch. The lifting drops the result where the batch was empty.
      merge: `(state, state) -> state`: another stream; associative, commutative, `init()` its identity. None where the
        order of batches matters.
      bounds: `(state, spec) -> (min_val, max_val)`: which real range is kept, where no range rule chooses one.
      extend_range: `(state, min_val, max_val) -> state`: what a state has to know of the extremes of a batch before
        that is summarized. None, for almost all, spares a pass over the data.
      bins: `(state) -> (edges, counts)`: the histogram that a range rule reads (see `jqobs.RangeRule`); its states then
        have the fields `min_val` and `max_val`. None where nothing is left to choose.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> from jqobs.observers._min_max import STATISTIC
      >>> STATISTIC.name, STATISTIC.fold is STATISTIC.merge
      ('min_max', True)
    """

    name: str
    init: Callable[[], State]
    summarize: Callable[[Chunk, State], Any]
    reduce: Callable[[Any, Any], Any]
    fold: Callable[[State, Any], State]
    merge: Callable[[State, State], State] | None
    bounds: Callable[[State, QuantSpec], tuple[jax.Array, jax.Array]]
    extend_range: Callable[[State, jax.Array, jax.Array], State] | None = None
    bins: Callable[[State], tuple[jax.Array, jax.Array]] | None = None
