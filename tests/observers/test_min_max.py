import jax.numpy as jnp
import numpy as np

import jqobs


def seen(observer, *batches):
    state = jqobs.calibrate(observer, [np.asarray(batch, np.float32) for batch in batches])
    return np.asarray(state.min_val).tolist(), np.asarray(state.max_val).tolist()


def test_one_sided_data_has_no_zero_in_it():
    assert seen(jqobs.min_max(), [7, 8], [9]) == (7, 9)
    assert seen(jqobs.min_max(), [-7], [-9]) == (-9, -7)


def test_channels_by_hand():
    x = [[1, -2, 3], [4, 5, -6]]
    for axis in (1, -1):
        observer = jqobs.min_max(qscheme=jqobs.per_channel_affine, ch_axis=axis)
        assert seen(observer, x) == ([1, -2, -6], [4, 5, 3])


def test_a_zero_has_no_sign():
    for batch in ([0.0, -0.0], [-0.0, 0.0], [-0.0]):
        state = jqobs.calibrate(jqobs.min_max(), [np.float32(batch)])
        assert not np.signbit(state.min_val)
        assert not np.signbit(state.max_val)


def test_subnormal_numbers_give_the_smallest_scale():
    observer = jqobs.min_max()
    scale, zero_point = observer.calculate_qparams(jqobs.calibrate(observer, [np.float32([0, 1e-40])]))
    assert (scale, zero_point) == (np.float32(1e-8), 0)


def test_a_channel_of_zeros():
    observer = jqobs.min_max(qscheme=jqobs.per_channel_symmetric, qdtype=jqobs.qint8, ch_axis=0)
    x = jnp.float32([[0, 0], [1, -2]])
    qparams = observer.calculate_qparams(jqobs.calibrate(observer, [x]))
    np.testing.assert_allclose(qparams.scale, [1e-8, 2 / 127.5], rtol=2e-7)
    assert jqobs.dequantize(jqobs.quantize(x, qparams), qparams)[0].tolist() == [0, 0]
    assert np.isfinite(jqobs.fake_quantize(x, qparams)).all()


def test_the_scale_of_half_data_is_not_rounded_to_half():
    x = jnp.asarray([-0.01, 0.01], jnp.bfloat16)
    observer = jqobs.min_max(qscheme=jqobs.per_tensor_symmetric, qdtype=jqobs.qint8)
    scale, _ = observer.calculate_qparams(jqobs.calibrate(observer, [x]))
    np.testing.assert_allclose(scale, 0.01000976562 / 127.5, rtol=1e-6)
