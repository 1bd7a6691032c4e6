import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jqobs
from jqobs.observers._log_histogram import OCTAVES, as_bins, signed_key

OBSERVER = jqobs.log_histogram(bins_per_octave=8)


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@given(st.lists(st.lists(st.floats(width=32), min_size=4, max_size=4), min_size=2, max_size=6), st.randoms())
def test_any_order_and_any_tree_of_merges_give_the_same_bits(batches, random):
    batches = [np.asarray(batch, np.float32) for batch in batches]
    one = functools.reduce(OBSERVER.update, batches, OBSERVER.init(batches[0]))
    random.shuffle(batches)
    states = [OBSERVER.update(OBSERVER.init(batch), batch) for batch in batches]
    while len(states) > 1:
        i, j = random.sample(range(len(states)), 2)
        merged = OBSERVER.merge(states[i], states[j])
        states = [state for k, state in enumerate(states) if k not in (i, j)] + [merged]
    assert bits(states[0]) == bits(one)
    if int(one.seen):
        assert bits(OBSERVER.calculate_qparams(states[0])) == bits(OBSERVER.calculate_qparams(one))


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=40))
def test_counts_and_multiplicities_against_numpy(values):
    x = np.asarray(values, np.float32)
    x = np.where(np.abs(x) < np.finfo(np.float32).smallest_normal, 0, x)
    state = OBSERVER.update(OBSERVER.init(x), x)
    assert (state.min_val, state.max_val) == (x.min(), x.max())
    assert (int(state.min_count), int(state.max_count)) == ((x == x.min()).sum(), (x == x.max()).sum())
    histogram = np.asarray(state.histogram).astype(int)
    assert histogram.sum() == x.size
    assert histogram[len(histogram) // 2] == (x == 0).sum()
    assert histogram[: len(histogram) // 2].sum() == (x < 0).sum()


def test_the_key_is_the_logarithm():
    x = np.float32(2.0) ** np.random.default_rng(0).uniform(-27, 19, 5000).astype(np.float32)
    keys = len(OCTAVES) * 8
    key = np.asarray(signed_key(jnp.asarray(x), 3, keys))
    octave = np.floor(np.log2(x.astype(np.float64)))
    expected = ((octave - OCTAVES.start) + (x / 2.0**octave - 1)) * 8 // 1 + 1
    assert np.array_equal(key, expected)
    assert np.array_equal(signed_key(-jnp.asarray(x), 3, keys), -key)
    assert signed_key(jnp.float32([0.0, -0.0, 1e-40, -1e-40]), 3, keys).tolist() == [0, 0, 0, 0]
    assert signed_key(jnp.float32([1e-30, 1e30, -1e30]), 3, keys).tolist() == [1, keys, -keys]


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-3, 1.0, 1e4, 1e12, 1e30])
@pytest.mark.parametrize("shift", [0, 6, -6])
def test_what_rules_see_ascends_between_the_extremes_and_keeps_every_value(scale, shift):
    x = ((np.random.default_rng(0).standard_normal(5000) + shift) * scale).astype(np.float32)
    x[::10] = 0
    state = OBSERVER.update(OBSERVER.init(x), x)
    edges, counts = (np.asarray(part) for part in as_bins(state, 8))
    assert (np.diff(edges) >= 0).all()
    assert (edges[0], edges[-1]) == (x.min(), x.max())
    assert counts.sum() == x.size
    assert (counts >= 0).all()
    points = counts[np.diff(edges) == 0]
    assert points.max() == (x == 0).sum()
    # In the window, what lies below an edge is exactly what was there.
    for i in np.flatnonzero(
        (np.diff(edges) > 0) & (np.abs(edges[:-1]) > np.abs(x).max() / 500) & (edges[:-1] > x.min())
    )[::7]:
        assert counts[:i].sum() == (x < edges[i]).sum()


def test_counts_past_two_to_the_32():
    observer = jqobs.log_histogram(bins_per_octave=8)
    state = observer.update(observer.init(jnp.zeros(3)), jnp.float32([0, 1, 1]))
    for _ in range(40):
        state = observer.merge(state, state)
    assert int(state.seen) == 3 * 2**40
    assert int(state.max_count) == 2**41
    assert np.asarray(state.histogram).sum() == 3 * 2**40
    scale, _ = observer.calculate_qparams(state)
    np.testing.assert_allclose(scale, 1 / 255, rtol=2e-7)


def test_it_maps_over_channels():
    x = np.random.default_rng(0).standard_normal((5, 1000)).astype(np.float32) * np.float32([[1], [2], [3], [4], [5]])
    x[3] = 0
    observer = OBSERVER.replace(qscheme=jqobs.per_channel_affine, ch_axis=0, qdtype=jqobs.quint4)
    state = observer.update(observer.init(x), x)
    scale, zero_point = observer.calculate_qparams(state)
    for i in range(5):
        alone = OBSERVER.replace(qdtype=jqobs.quint4)
        one = alone.calculate_qparams(alone.update(alone.init(x[i]), x[i]))
        np.testing.assert_allclose(scale[i], one.scale, rtol=1e-6)
        assert zero_point[i] == one.zero_point


@pytest.mark.parametrize("number", [0, -32, 3, 1, 2048, True, 2.5, "many"])
def test_bins_that_do_not_exist(number):
    with pytest.raises(ValueError, match="bins_per_octave must be"):
        jqobs.log_histogram(bins_per_octave=number)


def test_another_number_of_bins_is_refused():
    other = jqobs.log_histogram(bins_per_octave=16)
    state = other.init(jnp.zeros(3))
    for act in (lambda: OBSERVER.update(state, jnp.ones(3)), lambda: OBSERVER.merge(state, state),
                lambda: OBSERVER.calculate_qparams(state)):  # fmt: skip
        with pytest.raises(ValueError, match=r"log_histogram: histogram.low of the state must have shape \(769,\)"):
            act()
