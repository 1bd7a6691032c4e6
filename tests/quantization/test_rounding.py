import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqobs

GRANULARITIES = [
    ({"qscheme": jqobs.per_tensor_affine}, lambda v, x: v),
    ({"qscheme": jqobs.per_channel_symmetric, "ch_axis": -2}, lambda v, x: v.reshape(3, 1)),
    ({"qscheme": jqobs.per_channel_affine, "ch_axis": 1, "group_size": 5},
     lambda v, x: np.moveaxis(np.repeat(v, 5, -1).reshape(3, 2, 10), 0, 1)),
]  # fmt: skip
QDTYPES = ["qint8", "quint8", "qint4", "quint4", "qint2", "quint2", "qint16", "quint16", "qint32"]


def data(seed=0):
    return np.random.default_rng(seed).standard_normal((2, 3, 10)).astype(np.float32)


def grid(x, qdtype, how):
    observer = jqobs.min_max(qdtype=qdtype, **how)
    return observer.calculate_qparams(observer.update(observer.init(x), x / 2))


@pytest.mark.parametrize(
    ("name", "how", "spread"),
    [(name, *GRANULARITIES[0]) for name in QDTYPES]
    + [(name, *each) for name in ("quint8", "qint4") for each in GRANULARITIES[1:]],
)
def test_against_numpy(name, how, spread):
    x, qdtype = data(), getattr(jqobs, name)
    qparams = grid(x, qdtype, how)
    scale, zero_point = (spread(np.asarray(leaf), x) for leaf in qparams)
    codes = np.clip(np.round(x / scale) + zero_point.astype(np.float32), qdtype.quant_min, qdtype.quant_max)
    if name == "qint32":
        codes = np.clip(codes.astype(np.float64), -(2**31), 2**31 - 1)
    codes = codes.astype(qdtype.storage)
    real = (codes.astype(np.float32) - zero_point.astype(np.float32)) * scale
    for path in (lambda f: f, lambda f: lambda x, q: jax.vmap(lambda _: f(x, q))(jnp.arange(2))[0]):
        assert np.array_equal(path(jqobs.quantize)(x, qparams), codes)
        assert np.array_equal(path(jqobs.dequantize)(codes, qparams), real)
        assert np.array_equal(path(jqobs.fake_quantize)(x, qparams), real)
    assert jqobs.quantize(x, qparams).dtype == qdtype.storage
    assert jqobs.dequantize(codes, qparams).dtype == jnp.float32


@pytest.mark.parametrize("name", QDTYPES)
@pytest.mark.parametrize("value", [0.0, 5.0, -3.0])
def test_a_constant_comes_back_exactly(name, value):
    for qscheme in (jqobs.per_tensor_affine, jqobs.per_tensor_symmetric):
        observer = jqobs.min_max(qdtype=getattr(jqobs, name), qscheme=qscheme)
        x = jnp.full(4, value, jnp.float32)
        qparams = observer.calculate_qparams(observer.update(observer.init(x), x))
        back = np.asarray(jqobs.dequantize(jqobs.quantize(x, qparams), qparams))
        if qscheme is jqobs.per_tensor_affine or value == 0:
            np.testing.assert_allclose(back, value, rtol=1e-7)
        assert jqobs.dequantize(jqobs.quantize(jnp.zeros(1), qparams), qparams) == 0


def test_what_is_not_a_number():
    qparams = jqobs.calculate_qparams(-1.0, 3.0, jqobs.QuantSpec(jqobs.quint8, jqobs.per_tensor_affine))
    x = jnp.array([jnp.nan, jnp.inf, -jnp.inf])
    assert jqobs.quantize(x, qparams).tolist() == [64, 255, 0]
    assert np.isnan(jqobs.fake_quantize(x, qparams)[0])
    np.testing.assert_allclose(jqobs.fake_quantize(x, qparams)[1:], [191 * 4 / 255, -64 * 4 / 255], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_fake_quantize_keeps_the_dtype(dtype):
    qparams = jqobs.calculate_qparams(-1.0, 3.0, jqobs.QuantSpec(jqobs.quint8, jqobs.per_tensor_affine))
    x = jnp.linspace(-2, 4, 50).astype(dtype)
    y = jqobs.fake_quantize(x, qparams)
    assert y.dtype == x.dtype
    assert np.array_equal(y, jqobs.fake_quantize(x.astype(jnp.float32), qparams).astype(dtype))
    assert jax.grad(lambda x: jqobs.fake_quantize(x, qparams).sum())(x).dtype == x.dtype


def test_fake_quantize_refuses_integers():
    qparams = jqobs.calculate_qparams(-1.0, 3.0, jqobs.QuantSpec(jqobs.quint8, jqobs.per_tensor_affine))
    with pytest.raises(ValueError, match="x must be floating; got int32"):
        jqobs.fake_quantize(jnp.arange(3), qparams)


@pytest.mark.parametrize(("how", "spread"), GRANULARITIES)
def test_the_gradient_is_one_inside_and_zero_where_it_saturates(how, spread):
    x = data()
    qparams = grid(x, jqobs.qint4, how)
    scale, zero_point = (spread(np.asarray(leaf), x) for leaf in qparams)
    code = np.round(x / scale) + zero_point
    inside = (code >= -8) & (code <= 7)
    assert 0 < inside.mean() < 1
    weights = data(1)
    for transform in (jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.checkpoint(f))):
        gradient = transform(lambda x: jnp.sum(jqobs.fake_quantize(x, qparams) * weights))(jnp.asarray(x))
        assert np.array_equal(gradient, np.where(inside, weights, 0))
    _, tangent = jax.jvp(lambda x: jqobs.fake_quantize(x, qparams), (jnp.asarray(x),), (jnp.asarray(weights),))
    assert np.array_equal(tangent, np.where(inside, weights, 0))
    of_scale = jax.grad(lambda scale: jqobs.fake_quantize(x, dataclasses.replace(qparams, scale=scale)).sum())
    flat = of_scale(qparams.scale)
    assert not np.any(flat)
