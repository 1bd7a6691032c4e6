import jax.numpy as jnp
import pytest

import jqobs


def test_it_leaves_its_tensor_in_float():
    observer = jqobs.noop()
    state = observer.update(observer.init(jnp.zeros(3)), jnp.ones(3))
    with pytest.raises(RuntimeError, match="leaves its tensor in float"):
        observer.calculate_qparams(state)
