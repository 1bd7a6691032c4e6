import numpy as np
import pytest

import jqobs


def test_rules_are_cached_by_meaning_and_print_themselves():
    assert jqobs.percentile(99.9) is jqobs.percentile(p=99.9)
    assert repr(jqobs.percentile(99.9)) == "percentile(p=99.9)"
    observer = jqobs.log_histogram(range_rule=jqobs.percentile(99.9))
    assert repr(observer) == "log_histogram(range_rule=percentile(p=99.9))"
    assert jqobs.log_histogram(range_rule=jqobs.mse()) is jqobs.log_histogram()


def test_every_rule_is_public():
    for name in jqobs.range_rules.__all__:
        assert hasattr(jqobs, name) or name == "Range"


@pytest.mark.parametrize("factory", [jqobs.log_histogram, jqobs.histogram])
def test_a_function_of_a_third_party(factory):
    def half(edges, counts, min_val, max_val, grid):
        assert edges.shape[0] == counts.shape[0] + 1
        return min_val / 2, max_val / 2

    observer = factory(range_rule=half, qscheme=jqobs.per_channel_affine, ch_axis=0)
    x = np.float32([[0, 2], [-4, 8]])
    np.testing.assert_allclose(
        observer.calculate_qparams(jqobs.calibrate(observer, [x])).scale * 255, [1, 6], rtol=1e-6
    )
