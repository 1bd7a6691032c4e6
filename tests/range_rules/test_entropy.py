import numpy as np
import pytest
from distributions import sample

import jqobs


@pytest.mark.parametrize("factory", [jqobs.histogram, jqobs.log_histogram])
def test_it_clips_an_outlier_and_keeps_uniform_data(factory):
    def width(name, qdtype):
        observer = factory(range_rule=jqobs.entropy(), qdtype=qdtype)
        return float(observer.calculate_qparams(jqobs.calibrate(observer, sample(name))).scale) * (qdtype.levels - 1)

    assert width("one outlier", jqobs.quint8) < 20
    assert width("uniform", jqobs.quint8) > 1.9
    assert width("relu", jqobs.quint8) > 1


def test_the_divergence_by_brute_force():
    """No range of its own kind has a smaller divergence on the same bins, by a loop over cells in float64."""
    observer = jqobs.histogram(range_rule=jqobs.entropy(), qdtype=jqobs.quint4)
    state = jqobs.calibrate(observer, np.maximum(sample("normal"), 0))
    shares = np.asarray(state.histogram).astype(float) / int(state.seen)
    middles = (np.arange(2048) + 0.5) / 2048 * float(state.max_val)

    def divergence(scale):
        code = np.round(middles / scale)
        inside = code <= 15
        kept = np.where(inside, shares, 0)
        last = np.flatnonzero(inside)[-1]
        clipped = kept.copy()
        clipped[last] += shares[~inside].sum()
        quantized = np.zeros(2048)
        for cell in range(16):
            members = inside & (code == cell) & (shares > 0)
            quantized[members] = kept[inside & (code == cell)].sum() / max(members.sum(), 1)
        quantized /= quantized.sum()
        some = clipped > 0
        return np.sum(clipped[some] * np.log(clipped[some] / np.maximum(quantized[some], 1e-9)))

    chosen = float(observer.calculate_qparams(state).scale)
    best = min(divergence(float(state.max_val) / 15 * fraction) for fraction in np.linspace(0.1, 1, 200))
    assert divergence(chosen) <= best * 1.02 + 1e-6


def test_wide_grids_keep_the_full_range():
    state = jqobs.calibrate(jqobs.log_histogram(), sample("one outlier"))
    wide = jqobs.log_histogram(range_rule=jqobs.entropy(), qdtype=jqobs.qint16)
    assert wide.calculate_qparams(state) is not None
    np.testing.assert_allclose(wide.calculate_qparams(state).scale * 65535, state.max_val - state.min_val, rtol=1e-6)
