import jax.numpy as jnp
import numpy as np
import pytest

import jqobs


def test_data_never_changes_it():
    observer = jqobs.fixed_qparams(scale=1 / 256, zero_point=0)
    state = observer.init(jnp.zeros(3))
    after = observer.update(state, jnp.full(3, 1e9))
    for each in (state, after, observer.merge(state, after)):
        assert [float(leaf) for leaf in observer.calculate_qparams(each)] == [1 / 256, 0]


def test_a_tuple_is_for_channels():
    observer = jqobs.fixed_qparams(scale=(0.5, 2.0), zero_point=(0, 3), qscheme=jqobs.per_channel_affine, ch_axis=1)
    qparams = observer.calculate_qparams(observer.init(jnp.zeros((4, 2))))
    assert jqobs.dequantize(jnp.uint8([[2, 4]]), qparams).tolist() == [[1.0, 2.0]]
    assert qparams.scale.dtype == jnp.float32
    assert qparams.zero_point.dtype == jnp.int32


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"scale": 0.0, "zero_point": 0}, "scale must be"),
        ({"scale": float("nan"), "zero_point": 0}, "scale must be"),
        ({"scale": 1.0, "zero_point": 256}, r"zero_point must be a code of quint8, 0..255; got 256"),
        ({"scale": 1.0, "zero_point": 1.5}, "zero_point must be"),
        ({"scale": (1.0, 1.0), "zero_point": 0}, "one length"),
        ({"scale": (1.0,), "zero_point": (0,)}, "per-channel"),
        ({"scale": np.ones(2), "zero_point": 0}, "hashable"),
    ],
)
def test_what_is_no_grid(arguments, says):
    with pytest.raises(ValueError, match=says):
        jqobs.fixed_qparams(**arguments)
