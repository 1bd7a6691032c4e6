import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqobs
from jqobs.observers.batches import CHUNK, batch_stats, map_reduce_chunks

WHOLE = jqobs.QuantSpec()


@pytest.mark.parametrize("spoil", [None, jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("where", [0, 17, -1])
def test_a_look_at_what_is_finite_and_at_what_is_not(spoil, where):
    x = 9 - np.random.default_rng(0).exponential(1, 100).astype(np.float32)
    if spoil is not None:
        x[where] = spoil
    look = jax.jit(lambda x: batch_stats(x, None, WHOLE))(x)
    kept = x[np.isfinite(x)]
    assert (look.min_val, look.max_val) == (kept.min(), kept.max())
    assert (int(look.seen), int(look.nonfinite)) == (kept.size, 100 - kept.size)


@pytest.mark.parametrize("size", [2 * CHUNK, 2 * CHUNK + 1, 3 * CHUNK - 1])
def test_pieces_make_the_whole(size):
    x = jnp.asarray(np.random.default_rng(0).integers(0, 9, size), jnp.float32)
    mask = jnp.arange(size) % 3 == 0

    def total(x, mask):
        return jnp.sum(x if mask is None else x * mask, dtype=jnp.float32)

    assert map_reduce_chunks(total, jnp.add, x, None, splits=False) == np.asarray(x).sum()
    with jax.numpy_dtype_promotion("standard"):
        assert map_reduce_chunks(total, jnp.add, x, mask, splits=False) == np.asarray(x)[::3].sum()
