"""The search on costs whose best grid is known."""

import jax.numpy as jnp
import numpy as np
import pytest

import jqobs
from jqobs.range_rules._search import search


@pytest.mark.parametrize("qdtype", [jqobs.quint8, jqobs.quint4, jqobs.quint2], ids=repr)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("fraction", [0.9, 0.1, 0.002])
def test_it_finds_a_valley(qdtype, share, fraction):
    last = qdtype.levels - 1
    below, scale = round(share * last), 2 / last * fraction

    def cost(b, s):
        return ((b - below) / last) ** 2 + jnp.log(s / scale) ** 2

    grid = jqobs.QuantSpec(qdtype, jqobs.per_tensor_affine)
    ends = jnp.float32(-1), jnp.float32(1)
    better, low, high = search(cost, cost, *ends, grid, floor=jnp.float32(1e-9), gain=0.01)
    assert better
    np.testing.assert_allclose([low, high], [-below * scale, (last - below) * scale], rtol=0.01, atol=1e-6)


def test_it_keeps_the_full_range_without_a_gain():
    for qscheme in (jqobs.per_tensor_affine, jqobs.per_tensor_symmetric):
        grid = jqobs.QuantSpec(jqobs.qint8, qscheme)
        flat = lambda b, s: jnp.float32(1) + 0 * s  # noqa: E731
        better, *_ = search(flat, flat, jnp.float32(-1), jnp.float32(1), grid, floor=jnp.float32(1e-9), gain=0.01)
        assert not better
