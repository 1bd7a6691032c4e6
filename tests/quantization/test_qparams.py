import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqobs
from jqobs import per_channel_affine, per_tensor_affine, per_tensor_symmetric, qint8, qint32, quint4, quint8

LARGEST = 3.4028234663852886e38
RESTRICTED = dataclasses.replace(qint8, quant_min=-127)


@pytest.mark.parametrize(
    ("ends", "qscheme", "qdtype", "scale", "zero_point"),
    [
        ((1, 3), per_tensor_affine, quint8, 3 / 255, 0),
        ((-3, -1), per_tensor_affine, quint8, 3 / 255, 255),
        ((-1, 3), per_tensor_affine, quint8, 4 / 255, 64),
        ((-2, 1), per_tensor_affine, quint8, 3 / 255, 170),
        ((-1, 2), per_tensor_affine, quint8, 3 / 255, 85),
        ((1, 4), per_tensor_affine, quint4, 4 / 15, 0),
        ((-3, -1), per_tensor_affine, quint4, 0.2, 15),
        ((-8, 9), per_tensor_affine, quint8, 17 / 255, 120),
        ((-5, 7), per_tensor_affine, quint8, 12 / 255, 106),
        ((5, 5), per_tensor_affine, quint8, 5 / 255, 0),
        ((0, 0), per_tensor_affine, quint8, 1e-8, 0),
        ((0, 0), per_tensor_affine, qint8, 1e-8, -128),
        ((0, 12.7), per_tensor_affine, dataclasses.replace(quint8, quant_max=127), 0.1, 0),
        ((-1, 3), per_tensor_symmetric, qint8, 3 / 127.5, 0),
        ((-1, 3), per_tensor_symmetric, RESTRICTED, 3 / 127, 0),
        ((-1, 3), per_tensor_symmetric, quint8, 3 / 127.5, 128),
        ((-1, 3), per_tensor_symmetric, quint4, 0.4, 8),
        ((-1, 1), per_tensor_symmetric, qint32, 1 / 2147483647.5, 0),
        ((-LARGEST, LARGEST), per_tensor_affine, quint8, 2.6688811501061087e36, 128),
        ((-1e-7, 1e-7), per_tensor_symmetric, qint8, 1e-8, 0),
    ],
)
def test_by_hand(ends, qscheme, qdtype, scale, zero_point):
    for calculate in (jqobs.calculate_qparams, jax.jit(jqobs.calculate_qparams, static_argnums=2)):
        qparams = calculate(*map(jnp.float32, ends), jqobs.QuantSpec(qdtype, qscheme))
        np.testing.assert_allclose(qparams.scale, scale, rtol=2e-7)
        assert int(qparams.zero_point) == zero_point
        assert (qparams.scale.dtype, qparams.zero_point.dtype) == (jnp.float32, jnp.int32)
        assert qparams.scale.shape == qparams.zero_point.shape == ()


def test_ties_may_go_either_way():
    assert int(jqobs.calculate_qparams(-1, 1, jqobs.QuantSpec(quint8, per_tensor_affine)).zero_point) in (127, 128)
    assert int(jqobs.calculate_qparams(-1, 9, jqobs.QuantSpec(quint8, per_tensor_affine)).zero_point) in (25, 26)


def test_eps_is_a_floor():
    fine = jqobs.calculate_qparams(-1e-7, 1e-7, jqobs.QuantSpec(qint8, per_tensor_symmetric, eps=1e-12))
    np.testing.assert_allclose(fine.scale, 7.843137e-10, rtol=1e-6)


def test_a_grid_of_two_codes_stays_finite():
    two = dataclasses.replace(quint8, quant_max=1)
    assert np.isfinite(jqobs.calculate_qparams(-LARGEST, LARGEST, jqobs.QuantSpec(two, per_tensor_affine)).scale)
    assert np.isfinite(jqobs.calculate_qparams(-LARGEST, LARGEST, jqobs.QuantSpec(two, per_tensor_symmetric)).scale)


@pytest.mark.parametrize("qdtype", [quint8, qint8, quint4, jqobs.qint16], ids=repr)
@pytest.mark.parametrize("qscheme", [per_tensor_affine, per_tensor_symmetric], ids=repr)
def test_every_path_and_numpy_agree_on_200_000_ranges(qscheme, qdtype):
    rng = np.random.default_rng(0)
    width = np.exp(rng.uniform(-10, 10, (2, 200_000)))
    lo, hi = (-width[0]).astype(np.float32), (width[1] * rng.integers(0, 2, 200_000)).astype(np.float32)
    n = np.float32(qdtype.levels - 1)
    if qscheme.is_symmetric:
        scale = np.maximum(np.maximum(-lo, hi) / (n / 2), np.float32(1e-8))
        middle = 0 if qdtype.quant_min < 0 else (qdtype.quant_max + qdtype.quant_min + 1) // 2
        zero_point = np.full(lo.shape, middle)
    else:
        scale = np.maximum((hi - lo) / n, np.float32(1e-8))
        zero_point = np.clip(qdtype.quant_min - np.round(lo / scale), qdtype.quant_min, qdtype.quant_max)

    def calculate(lo, hi):
        return tuple(jqobs.calculate_qparams(lo, hi, jqobs.QuantSpec(qdtype, qscheme)))

    for path in (calculate, jax.jit(calculate), jax.vmap(calculate), jax.jit(jax.vmap(calculate))):
        assert np.array_equal(path(lo, hi)[0], scale)
        assert np.array_equal(path(lo, hi)[1], zero_point)


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        ((3, 1), "min_val=3.0, max_val=1.0"),
        ((float("nan"), 1), "min_val=nan"),
        ((-float("inf"), 1), "min_val=-inf"),
        (([0, 1], [1, 0.5]), r"min_val=1.0, max_val=0.5 at \[1\]"),
        (([0, 1], 1), r"\(2,\) and \(\)"),
    ],
)
def test_ranges_that_are_none(ends, says):
    with pytest.raises(ValueError, match=says):
        jqobs.calculate_qparams(*map(np.float32, ends), jqobs.QuantSpec())


def test_it_is_a_pytree_of_two_leaves_that_unpacks():
    qparams = jqobs.calculate_qparams(jnp.zeros(3), jnp.ones(3), jqobs.QuantSpec(quint8, per_channel_affine, ch_axis=1))
    scale, zero_point = qparams
    assert [leaf.shape for leaf in jax.tree.leaves(qparams)] == [(3,), (3,)]
    assert scale is qparams.scale
    assert zero_point is qparams.zero_point
    assert jax.tree.map(lambda leaf: leaf, qparams).ch_axis == 1


def test_it_refuses_data_of_other_channels():
    qparams = jqobs.calculate_qparams(jnp.zeros(3), jnp.ones(3), jqobs.QuantSpec(quint8, per_channel_affine, ch_axis=1))
    for shape, says in [((3, 4), r"\(4,\).*\(3,\)"), ((3,), "out of range")]:
        with pytest.raises(ValueError, match=says):
            qparams.broadcast_to(shape)
    unbound = jqobs.calculate_qparams(jnp.zeros(3), jnp.ones(3), jqobs.QuantSpec(quint8, per_channel_affine))
    with pytest.raises(ValueError, match="ch_axis must be given"):
        unbound.broadcast_to((3,))
