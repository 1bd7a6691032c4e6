"""What is asked of every observer over meshes is in the contract."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jqobs.sharding.array_types import is_on_one_device, reduce_leading


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 13])
def test_reduce_leading_uses_every_slice_once(n):
    values = jnp.asarray(np.random.default_rng(n).integers(0, 1000, (n, 2)))
    assert np.array_equal(reduce_leading(jnp.add, values), values.sum(0))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_spread_array_is_told_from_its_type(kind):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType[kind],))
    spread = jax.device_put(jnp.zeros(8), NamedSharding(mesh, P("data")))
    answers = []
    jax.jit(lambda x, y: answers.extend([is_on_one_device(x), is_on_one_device(y)]))(spread, jnp.zeros(8))
    assert answers[0] is False
    assert is_on_one_device(jnp.zeros(8))
