import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jqobs


def counts(bins, *batches):
    observer = jqobs.histogram(bins=bins)
    state = jqobs.calibrate(observer, [np.asarray(batch, np.float32) for batch in batches])
    observer.calculate_qparams(state)
    return np.asarray(state.histogram).tolist()


@pytest.mark.parametrize(
    ("bins", "batches", "expected"),
    [
        (10, [[5] * 4, [0, 10]], [1, 0, 0, 0, 0, 4, 0, 0, 0, 1]),
        (10, [[0, 10], [5] * 4], [1, 0, 0, 0, 0, 4, 0, 0, 0, 1]),
        (8, [[0] * 4, [0] * 4, [0, 0.25, 0.5, 1]], [9, 0, 1, 0, 1, 0, 0, 1]),
        (4, [[0, 0.1, 0.5, np.nan, 1]], [2, 0, 1, 1]),
        (4, [[-3.0, -3.0]], [2, 0, 0, 0]),
        (2, [[1], [2], [3]], None),
    ],
)
def test_by_hand(bins, batches, expected):
    got = counts(bins, *batches)
    assert sum(got) == np.isfinite(np.concatenate(batches)).sum()
    assert expected is None or got == expected


def test_a_doubled_range_halves_the_resolution():
    eighths = (np.arange(8) + 0.5) / 8
    got = counts(8, np.concatenate([[0, 1], eighths]), [0, 2])
    assert got in ([4, 2, 2, 2, 1, 0, 0, 1], [4, 2, 2, 3, 0, 0, 0, 1])


@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=60), st.integers(2, 40))
def test_one_batch_against_numpy(values, bins):
    x = np.asarray(values, np.float32)
    x = np.where(np.abs(x) < 1e-30, 0, x)
    state = jqobs.calibrate(jqobs.histogram(bins=40, range_rule=jqobs.percentile(100)), [x])
    got = np.cumsum(np.asarray(state.histogram).astype(int))
    edges = np.linspace(np.float64(x.min()), np.float64(x.max()), 41)
    slack = (edges[-1] - edges[0]) * 1e-5
    # A value at an edge may fall to either side of it.
    assert (got >= [(x < edge - slack).sum() for edge in edges[1:]]).all()
    assert (got[:-1] <= [(x <= edge + slack).sum() for edge in edges[1:-1]]).all()
    assert got[-1] == x.size


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6), st.integers(0, 2**31))
def test_no_value_is_lost_however_the_range_grows(widths, seed):
    rng = np.random.default_rng(seed)
    batches = [rng.uniform(-width, width, 50).astype(np.float32) for width in widths]
    state = jqobs.calibrate(jqobs.histogram(bins=128), batches)
    assert np.asarray(state.histogram).sum() == 50 * len(batches) == int(state.seen)
    assert (state.min_val, state.max_val) == (np.min(batches), np.max(batches))


def test_counts_past_two_to_the_24():
    observer = jqobs.histogram(bins=2)
    state = jqobs.calibrate(observer, [np.float32([0, 1])])
    state = state._replace(histogram=jqobs.Count(low=jnp.full(2, 16777216, jnp.uint32), high=state.histogram.high))
    state = jqobs.calibrate(observer, [np.float32([0, 1])] * 4, state=state)
    assert np.asarray(state.histogram).tolist() == [16777220, 16777220]
    full = state._replace(
        histogram=jqobs.Count(low=jnp.full(2, 2**32 - 1, jnp.uint32), high=jnp.full(2, 5, jnp.uint32))
    )
    wider = jqobs.calibrate(observer, [np.float32([-3, 5])], state=full)
    assert np.asarray(wider.histogram).astype(object).sum() == 2 * (6 * 2**32 - 1) + 2


def test_the_extremes_of_float32_have_a_width():
    big = 3.4028234663852886e38
    assert counts(4, [-big, 0, big]) == [1, 0, 1, 1]
    assert counts(4, [0, 1e-37]) == [1, 0, 0, 1]


def test_one_far_outlier_and_two_thousand_values():
    x = np.random.default_rng(0).standard_normal(2000).astype(np.float32)
    x[7] = 50
    for observer in (jqobs.histogram(), jqobs.log_histogram()):
        state = jqobs.calibrate(observer, [x])
        assert np.asarray(state.histogram).sum() == 2000
        narrow = observer.replace(qdtype=jqobs.quint4).calculate_qparams(state)
        assert 15 * narrow.scale < 50


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_halves_of_a_batch_count_as_the_whole(dtype):
    x = jnp.linspace(0, 1, 5000).astype(dtype)
    whole = jqobs.calibrate(jqobs.histogram(bins=8), [x])
    assert np.asarray(whole.histogram).sum() == 5000
    assert (
        np.asarray(jqobs.calibrate(jqobs.histogram(bins=8), [jnp.zeros(5000, dtype)]).histogram).tolist()
        == [5000] + [0] * 7
    )


def test_the_state_of_a_layer_is_in_sight():
    layer = jqobs.nnx.HistogramObserver(bins=10)
    layer(jnp.array([5.0, 5.0]))
    layer(jnp.array([0.0, 10.0]))
    assert np.asarray(layer.histogram).tolist() == [1, 0, 0, 0, 0, 2, 0, 0, 0, 1]
    _, variables = jqobs.linen.HistogramObserver(bins=4).apply({}, jnp.array([0.0, 10.0]), mutable=["observers"])
    assert np.asarray(variables["observers"]["state"].histogram).tolist() == [1, 0, 0, 1]


def test_a_batch_in_pieces_is_the_batch():
    rng = np.random.default_rng(0)
    x = rng.standard_normal(2**19 + 12345).astype(np.float32)
    x[::1000] = np.nan
    mask = rng.random(x.size) < 0.5
    for observer in (jqobs.histogram(), jqobs.log_histogram(), jqobs.min_max(), jqobs.moving_average_min_max()):
        empty = observer.init(x)
        for kept in (None, mask):
            whole = observer.update(empty, x, mask=kept)
            # As rows: the same values, never cut.
            rows = observer.replace(qscheme=jqobs.per_channel_affine, ch_axis=0)
            row = rows.update(rows.init(x[None]), x[None], mask=None if kept is None else kept[None])
            for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(row), strict=True):
                assert np.array_equal(one, other[0])
    assert int(whole.nonfinite) == (mask & np.isnan(x)).sum()


@pytest.mark.parametrize("bins", [1, 0, -4, 5000, 2.5, True, "many"])
def test_bins_that_do_not_exist(bins):
    with pytest.raises(ValueError, match="bins must be"):
        jqobs.histogram(bins=bins)


def test_a_rule_has_to_be_callable():
    for factory in (jqobs.histogram, jqobs.log_histogram):
        with pytest.raises(ValueError, match="range_rule must be"):
            factory(range_rule="mse")
