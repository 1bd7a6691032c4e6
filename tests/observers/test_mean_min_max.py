import jax
import jax.numpy as jnp
import numpy as np

import jqobs

OBSERVER = jqobs.mean_min_max()


def test_the_unit_is_the_batch_and_not_the_part_on_a_device():
    parts = jnp.float32([[1, 1, 1], [5, 5, 5]])
    whole = jax.vmap(lambda x: OBSERVER.update(OBSERVER.init(x), x, axis_name="i"), axis_name="i")(parts)
    assert whole.max_val.tolist() == [5, 5]
    assert np.asarray(whole.batches).tolist() == [1, 1]
    assert jqobs.calibrate(OBSERVER, [np.float32([1, 5]), np.float32([-1])]).max_val == 2


def test_many_batches_lose_nothing():
    step = jax.jit(lambda state, _: (OBSERVER.update(state, jnp.float32([-1.1, 1.1])), None))
    state, _ = jax.lax.scan(step, OBSERVER.init(jnp.zeros(2)), length=100_000)
    assert state.max_val == np.float32(1.1)
    for _ in range(20):
        state = OBSERVER.merge(state, state)
    np.testing.assert_allclose(state.max_val, 1.1, rtol=1e-5)
    assert int(state.batches) == 100_000 * 2**20


def test_it_does_not_overflow():
    big = np.float32([-3e38, 3e38])
    state = jqobs.calibrate(OBSERVER, [big, big, big])
    np.testing.assert_allclose([state.min_val, state.max_val], big, rtol=1e-6)
    other = jqobs.calibrate(OBSERVER, [np.float32([2e38, 3e38])] * 2)
    np.testing.assert_allclose(OBSERVER.merge(state, other).min_val, (-9e38 + 4e38) / 5, rtol=1e-5)
