"""What the layers of Linen and NNX promise alike."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqobs

GROUPS = {"qscheme": jqobs.per_channel_symmetric, "qdtype": jqobs.qint4, "ch_axis": 0, "group_size": 2}


def shown(framework, layer, x):
    """The range that a layer has after it was shown `x`."""
    if framework is jqobs.nnx:
        layer(x)
        return layer.calculate_qparams(), layer.state.get_value()
    _, variables = layer.apply({}, x, mutable=["observers"])
    return layer.apply(variables, method="calculate_qparams"), variables["observers"]["state"]


@pytest.mark.parametrize("framework", [jqobs.linen, jqobs.nnx], ids=["linen", "nnx"])
def test_groups_of_a_named_layer(framework):
    x = jnp.arange(12.0).reshape(2, 6)
    qparams, _ = shown(framework, framework.MinMaxObserver(**GROUPS), x)
    observer = jqobs.min_max(**GROUPS)
    expected = observer.calculate_qparams(observer.update(observer.init(x), x))
    assert (qparams.scale.shape, qparams.spec) == ((2, 3), observer.spec)
    np.testing.assert_array_equal(qparams.scale, expected.scale)
    np.testing.assert_allclose(qparams.scale * 7, x.reshape(2, 3, 2).max(2), rtol=0.08)


@pytest.mark.parametrize("framework", [jqobs.linen, jqobs.nnx], ids=["linen", "nnx"])
@pytest.mark.parametrize("kind", ["named", "observe", "fake_quantize"])
def test_a_layer_names_a_mapped_axis(framework, kind):
    observer = jqobs.moving_average_min_max()  # Its result tells a batch from its parts.
    build = {
        "named": framework.MovingAverageMinMaxObserver,
        "observe": functools.partial(framework.Observe, observer),
        "fake_quantize": functools.partial(framework.FakeQuantize, observer),
    }[kind]
    x = jax.random.normal(jax.random.key(0), (4, 5))

    def on_each(x):
        layer = build(axis_name="device")
        return shown(framework, layer, x)[1]

    states = jax.vmap(on_each, axis_name="device")(x)
    whole = observer.update(observer.init(x), x)
    np.testing.assert_array_equal(states.min_val, np.full(4, whole.min_val))
    np.testing.assert_array_equal(states.max_val, np.full(4, whole.max_val))
    apart = jax.vmap(lambda x: shown(framework, build(), x)[1])(x)
    assert len(set(np.asarray(apart.min_val).tolist())) == 4
