import fractions

import numpy as np
import pytest

import jqobs


def seen(constant, *batches):
    observer = jqobs.moving_average_min_max(averaging_constant=constant)
    state = jqobs.calibrate(observer, [np.asarray(batch, np.float32) for batch in batches])
    return float(state.min_val), float(state.max_val)


def test_by_hand():
    np.testing.assert_allclose(seen(0.01, [0, 2], [-10, 10]), [-0.1, 2.08], rtol=1e-6)
    np.testing.assert_allclose(seen(0.01, [0, 2], [-10, 10], [-10, 10]), [-0.199, 2.1592], rtol=1e-6)
    assert seen(0.5, [-2, 2], [-4, 4]) == (-3, 3)
    assert seen(0.01, [2]) == (2, 2)


def test_a_constant_of_one_replaces_exactly():
    for one in (1, 1.0, np.float32(1), fractions.Fraction(1)):
        assert seen(one, [-1e8, 1e8], [-0.3, 0.3]) == (np.float32(-0.3), np.float32(0.3))


def test_an_empty_batch_does_not_count_as_the_first():
    assert seen(0.5, [np.nan], [-4, 4], [np.nan], [-2, 2]) == (-3, 3)


def test_it_does_not_overflow_on_the_way():
    big = 3.4028235e38
    low, high = seen(0.25, [-big, 0], [big, big], [1, 2])
    np.testing.assert_allclose(low, (-big * 0.75 + big * 0.25) * 0.75, rtol=1e-5)
    np.testing.assert_allclose(high, big * 0.25 * 0.75, rtol=1e-5)


@pytest.mark.parametrize("constant", [0, -0.1, 1.01, float("nan"), "0.1", None])
def test_constants_that_do_not_exist(constant):
    with pytest.raises(ValueError, match="averaging_constant must be"):
        jqobs.moving_average_min_max(averaging_constant=constant)


def test_it_cannot_be_merged():
    assert jqobs.moving_average_min_max().merge is None
