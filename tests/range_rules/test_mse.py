"""CachedQParams against an exhaustive search over the raw values in float64, which knows nothing of histograms."""

import numpy as np
import pytest
from distributions import sample
from oracle import Oracle
from range_quality import GRIDS, qdtype_for
from sklearn.datasets import load_digits

import jqobs

GRID_IDS = [f"{scheme.value[11:]}-{bits}" for scheme, bits in GRIDS]


def true_errors(x, scheme, bits, observer=None):
    """The errors of the grid that was chosen, of the full range, and of the best range."""
    qdtype = qdtype_for(scheme, bits)
    observer = (observer or jqobs.log_histogram()).replace(qscheme=scheme, qdtype=qdtype)
    scale, zero_point = observer.calculate_qparams(jqobs.calibrate(observer, np.asarray(x, np.float32)[None]))
    oracle = Oracle(x, qdtype.levels, scheme.is_symmetric, qdtype.quant_min)
    chosen = oracle.error(np.array([scale]), np.array([zero_point]) - qdtype.quant_min)[0]
    return chosen, oracle.full(), oracle


@pytest.mark.parametrize("grid", GRIDS, ids=GRID_IDS)
@pytest.mark.parametrize("name", ["student-t3", "relu", "gelu", "one outlier", "bimodal", "uniform", "softmax"])
def test_within_a_percent_of_the_best_range(name, grid):
    chosen, full, oracle = true_errors(sample(name), *grid)
    assert chosen <= 1.01 * oracle.best()
    assert chosen <= full


@pytest.mark.parametrize("grid", GRIDS, ids=GRID_IDS)
@pytest.mark.parametrize(
    "make",
    [
        lambda rng: np.clip(rng.standard_normal(20000) * 4, 0, 6),
        lambda rng: np.clip(rng.standard_normal(20000), -1, 1),
        lambda rng: np.maximum(rng.standard_normal(20000), -0.3),
        lambda rng: rng.choice([0.0, 1.0], 1000),
        lambda rng: rng.choice([-1.0, 3.0], 1000),
        lambda rng: np.where(rng.random(20000) < 0.9, 0, rng.standard_normal(20000)),
    ],
    ids=["relu6", "clipped to both", "clipped to one", "zeros and ones", "two values", "sparse"],
)
def test_point_masses(make, grid):
    x = make(np.random.default_rng(0)).astype(np.float32)
    chosen, full, oracle = true_errors(x, *grid)
    assert chosen <= max(1.01 * oracle.best(), 1e-12 * np.square(x).max())
    assert chosen <= full


def test_zeros_and_ones_are_held_exactly():
    observer = jqobs.log_histogram()
    scale, zero_point = observer.calculate_qparams(jqobs.calibrate(observer, [np.float32([0, 1] * 50)]))
    assert (scale, zero_point) == (np.float32(1) / np.float32(255), 0)


@pytest.mark.parametrize(
    "values",
    [
        np.arange(256) / 255,
        np.arange(256.0),
        np.minimum(load_digits().images, 15),
        np.append(np.clip(np.random.default_rng(0).normal(60, 40, 50000).round(), 0, 255), 255) / 255,
        np.random.default_rng(0).integers(-100, 156, 50000) * 0.01,
    ],
    ids=["levels", "integers", "digits", "dark image", "around zero"],
)
@pytest.mark.parametrize("factory", [jqobs.log_histogram, jqobs.min_max])
def test_data_that_the_grid_holds_exactly_keeps_the_full_range(values, factory):
    bits = 4 if values.max() == 15 else 8
    qdtype = qdtype_for(jqobs.per_tensor_affine, bits)
    x = np.asarray(values, np.float32)
    observer = factory(qdtype=qdtype)
    qparams = observer.calculate_qparams(jqobs.calibrate(observer, x[None]))
    np.testing.assert_allclose(jqobs.fake_quantize(x, qparams), x, atol=2e-6 * np.abs(x).max())


@pytest.mark.parametrize("seed", range(4))
def test_continuous_data_is_not_taken_for_a_grid(seed):
    rng = np.random.default_rng(seed)
    for x in (rng.standard_normal(30), rng.exponential(1, 300), rng.standard_normal(3000) + 20):
        chosen, full, oracle = true_errors(x.astype(np.float32), jqobs.per_tensor_affine, 4)
        assert chosen <= full
        assert chosen <= 1.05 * oracle.best()


DEGENERATE = [[5.0], [-3.0], [0.0], [0, 1e-40], [1e-20], [3e38, -3e38], [7.0, 7.5], [-1, 0], [1e30, 1, 1, 1]]


@pytest.mark.parametrize("grid", GRIDS, ids=GRID_IDS)
@pytest.mark.parametrize("rule", ["mse", "norm_minimization", "entropy"])
def test_degenerate_data_is_answered(grid, rule):
    scheme, bits = grid
    if rule != "mse" and (bits != 4 or scheme.is_symmetric):
        pytest.skip("one grid is enough for a rule that is not the default")
    for factory in (jqobs.log_histogram, jqobs.histogram):
        observer = factory(qscheme=scheme, qdtype=qdtype_for(*grid), range_rule=getattr(jqobs, rule)())
        for values in DEGENERATE:
            x = np.resize(np.float32(values), 4)  # Of one shape, so that one program does for all.
            scale, zero_point = observer.calculate_qparams(observer.update(observer.init(x), x))
            assert np.isfinite(scale), values
            assert scale > 0, values
            qdtype = observer.recipe.get("qdtype")
            assert qdtype.quant_min <= zero_point <= qdtype.quant_max, values


def test_constants_come_back():
    for value, zero_point in ((5.0, 0), (-3.0, 255)):
        observer = jqobs.log_histogram()
        qparams = observer.calculate_qparams(jqobs.calibrate(observer, [np.full(4, value, np.float32)]))
        np.testing.assert_allclose(qparams.scale, abs(value) / 255, rtol=2e-7)
        assert qparams.zero_point == zero_point


def test_the_number_of_codes_is_the_grids():
    import dataclasses

    x = sample("normal")
    few = dataclasses.replace(jqobs.quint8, quant_max=15)
    one, other = (jqobs.log_histogram(qdtype=qdtype) for qdtype in (few, jqobs.quint4))
    state = jqobs.calibrate(one, x)
    assert one.calculate_qparams(state).scale == other.calculate_qparams(state).scale
    assert 15 * one.calculate_qparams(state).scale < 255 * jqobs.log_histogram().calculate_qparams(state).scale


def test_wide_grids_keep_the_full_range():
    x = sample("one outlier")
    observer = jqobs.log_histogram(qdtype=jqobs.qint32, qscheme=jqobs.per_tensor_symmetric)
    state = jqobs.calibrate(observer, x)
    full = observer.replace(range_rule=jqobs.percentile(100))
    assert observer.calculate_qparams(state).scale == full.calculate_qparams(state).scale


def test_normal_data_of_the_reference():
    """Its answer for this sample is 0.0273022. On 2,048 values the error of any one grid is known to 2 % only."""
    x = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    chosen, full, oracle = true_errors(x, jqobs.per_tensor_affine, 8)
    assert chosen <= 1.005 * oracle.error(np.array([0.027302185]), np.array([143]))[0]
    assert chosen <= 1.005 * full


def test_a_collected_state_is_read_by_every_rule_at_every_width():
    state = jqobs.calibrate(jqobs.log_histogram(), sample("laplace"))
    rules = jqobs.mse(), jqobs.percentile(99), jqobs.norm_minimization()
    observers = [jqobs.log_histogram(range_rule=rule, qdtype=q) for rule in rules for q in (jqobs.quint8, jqobs.quint4)]
    scales = [float(observer.calculate_qparams(state).scale) for observer in observers]
    assert len(set(scales)) == len(scales)
    assert np.isfinite(scales).all()
