import jax.numpy as jnp
import numpy as np
import pytest

import jqobs

AFFINE, SYMMETRIC = (
    jqobs.QuantSpec(jqobs.quint8, jqobs.per_tensor_affine),
    jqobs.QuantSpec(jqobs.qint8, jqobs.per_tensor_symmetric),
)


@pytest.mark.parametrize("p", [90, 99, 99.9])
@pytest.mark.parametrize("factory", [jqobs.log_histogram, jqobs.histogram])
def test_against_numpy(p, factory):
    x = np.random.default_rng(0).laplace(1, 2, 50000).astype(np.float32)
    state = jqobs.calibrate(factory(), [x])
    affine = factory(range_rule=jqobs.percentile(p)).calculate_qparams(state)
    low, high = np.percentile(x, [100 - p, p])
    np.testing.assert_allclose(affine.scale * 255, high - low, rtol=0.01)
    symmetric = factory(range_rule=jqobs.percentile(p), qscheme=jqobs.per_tensor_symmetric).calculate_qparams(state)
    np.testing.assert_allclose(symmetric.scale * 127.5, np.percentile(np.abs(x), p), rtol=0.01)


def test_by_hand():
    edges, counts = jnp.arange(5.0), jnp.full(4, 10.0)
    low, high = jqobs.percentile(50)(edges, counts, edges[0], edges[-1], AFFINE)
    np.testing.assert_allclose([low, high], 2, rtol=1e-6)
    low, high = jqobs.percentile(75)(edges - 2, counts, edges[0] - 2, edges[-1] - 2, SYMMETRIC)
    np.testing.assert_allclose([low, high], [-1.5, 1.5], rtol=1e-6)


def test_the_whole_is_the_full_range_and_points_are_met_exactly():
    edges, counts = jnp.float32([0, 0, 1, 1]), jnp.float32([50, 0, 50])
    for p in (60, 99.99, 100):
        assert jqobs.percentile(p)(edges, counts, edges[0], edges[-1], AFFINE) == (0, 1)


@pytest.mark.parametrize("p", [49, 101, -1, "99", None])
def test_percentiles_that_do_not_exist(p):
    with pytest.raises(ValueError, match="p must be"):
        jqobs.percentile(p)
