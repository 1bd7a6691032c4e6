import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jqobs.range_rules._bins import evened, mass_between, mean_errors, thinned

EDGES = np.sort(np.random.default_rng(0).uniform(-3, 5, 40)).astype(np.float32)
COUNTS = np.random.default_rng(1).integers(0, 50, 39).astype(np.float32)


@given(st.floats(0.05, 3), st.integers(0, 7))
def test_mean_errors_against_many_points(step, below):
    step = np.float32(step)
    code = np.clip(np.round(EDGES / step), -below, 7 - below)
    got = mean_errors(jnp.asarray(EDGES), jnp.asarray(code), jnp.asarray(EDGES - code * step), jnp.float32(step))
    for i, error in enumerate(np.asarray(got)):
        points = EDGES[i] + (EDGES[i + 1] - EDGES[i]) * (np.arange(4000) + 0.5) / 4000
        nearest = np.clip(np.round(points / step), -below, 7 - below) * step
        np.testing.assert_allclose(error, np.mean((points - nearest) ** 2), rtol=2e-3, atol=1e-6)


@given(st.floats(-4, 6), st.floats(0, 10))
def test_mass_between_against_a_loop(low, width):
    high, expected = low + width, 0.0
    for left, right, n in zip(EDGES[:-1], EDGES[1:], COUNTS, strict=True):
        expected += n * max(0.0, min(right, high) - max(left, low)) / (right - left)
    got = mass_between(jnp.asarray(EDGES), jnp.asarray(COUNTS), jnp.float32(low), jnp.float32(high))
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=0.05)


def test_other_bins_hold_the_same_values():
    for times in (1, 3, 8, 100):
        edges, counts = thinned(jnp.asarray(EDGES), jnp.asarray(COUNTS), times)
        assert counts.sum() == COUNTS.sum()
        assert (edges[0], edges[-1]) == (EDGES[0], EDGES[-1])
    edges, counts = evened(jnp.asarray(EDGES), jnp.asarray(COUNTS), 50)
    np.testing.assert_allclose(counts.sum(), COUNTS.sum(), rtol=1e-6)
    for i in (10, 25, 40):
        below = mass_between(jnp.asarray(EDGES), jnp.asarray(COUNTS), edges[0], edges[i])
        np.testing.assert_allclose(counts[:i].sum(), below, rtol=1e-3)
