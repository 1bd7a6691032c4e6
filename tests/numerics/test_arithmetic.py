import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jqobs.numerics.arithmetic import divide, interpolate, opaque

X = np.random.default_rng(0).standard_normal(20000).astype(np.float32)

PATHS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "vmap": jax.vmap,
    "jit_of_vmap": lambda f: jax.jit(jax.vmap(f)),
    "grad": lambda f: jax.jit(lambda x: jax.value_and_grad(lambda x: f(x).sum(), has_aux=False)(x) and f(x)),
}


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("denominator", [255.0, 127.5, 3.0, 1e30])
def test_divide_is_ieee_on_every_path(path, denominator):
    expected = X / np.float32(denominator)
    assert np.array_equal(path(lambda x: divide(x, denominator))(jnp.asarray(X)), expected)
    scalar = jnp.float32(denominator)
    assert np.array_equal(path(lambda x: divide(x, scalar))(jnp.asarray(X)), expected)


def test_the_compiler_does_differ_without_it():
    assert (np.asarray(jax.jit(lambda x: x / 255.0)(X)) != X / np.float32(255)).mean() > 0.3


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_interpolate_rounds_each_step(path):
    expected = X + np.float32(0.01) * (X[::-1] - X)
    pairs = jnp.stack([jnp.asarray(X), jnp.asarray(X[::-1])], 1)
    got = path(lambda pair: interpolate(pair[..., 0], pair[..., 1], 0.01))(pairs)
    assert np.array_equal(got, expected)


def test_hide_passes_nan_and_infinities():
    behind = jnp.array([1.0, jnp.nan, jnp.inf])
    assert np.array_equal(opaque(7.0, behind), [7.0, np.nan, 7.0], equal_nan=True)
    assert np.array_equal(divide(behind, 2.0), [0.5, np.nan, np.inf], equal_nan=True)
