import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from test_linen_layers import Twice, X, observe

import jqobs


class Model(nn.Module):
    """Observers at several depths, one of them used only in training, and one in a list."""

    def setup(self):
        self.parts = [nn.Dense(3), jqobs.linen.MovingAverageMinMaxObserver()]
        self.other = jqobs.linen.PerChannelMinMaxObserver(ch_axis=-1)
        self.ignored = jqobs.linen.NoopObserver()
        self.drop = nn.Dropout(0.5)

    def __call__(self, x, train=False):
        x = self.drop(self.parts[1](self.parts[0](x)), deterministic=not train)
        return self.ignored(self.other(x) if train else x)


def test_a_model_is_read_by_path():
    model = Model()
    variables = model.init(jax.random.key(0), X, train=False)
    run = {"train": True, "rngs": {"dropout": jax.random.key(1)}}
    _, update = model.apply(variables, X, mutable=["observers"], **run)
    variables = {**variables, **update}
    qparams = jqobs.linen.calculate_qparams(model, variables, X, **run)
    assert {path: grid.scale.shape for path, grid in qparams.items()} == {"parts_1": (), "other": (3,)}
    assert list(jqobs.linen.calculate_qparams(model, variables, jax.ShapeDtypeStruct(X.shape, X.dtype))) == ["parts_1"]
    jqobs.linen.check_observed(model, variables, X, **run)


def test_what_saw_nothing_is_named():
    model = Model()
    variables = observe(model, model.init(jax.random.key(0), X), X)
    run = {"train": True, "rngs": {"dropout": jax.random.key(1)}}
    with pytest.warns(UserWarning, match="1 of 3 observers .*: other$"):
        assert list(jqobs.linen.calculate_qparams(model, variables, X, **run)) == ["parts_1"]
    with pytest.raises(jqobs.NotCalibratedError, match="recorded nothing: other"):
        jqobs.linen.check_observed(model, variables, X, **run)
    with pytest.raises(jqobs.NotCalibratedError, match="parts_1"):
        jqobs.linen.calculate_qparams(model, model.init(jax.random.key(0), X), X)


def test_a_scan_that_drops_the_collection_is_found():
    model = Twice("scan", axes=("params",))
    variables = observe(model, model.init(jax.random.key(0), X), X)
    assert "observers" not in variables
    with pytest.raises(jqobs.NotCalibratedError, match=r"block/watch.*variable_axes=\{\"observers\": 0\}"):
        jqobs.linen.check_observed(model, variables, X)


def test_a_model_compiled_before_is_read_all_the_same():
    model = Twice("jit")
    variables = observe(model, model.init(jax.random.key(0), X), X, times=2)
    for _ in range(2):
        assert list(jqobs.linen.calculate_qparams(model, variables, X)) == ["block/watch"]


def test_states_pass_through_flax_serialization():
    model = Twice("plain", observer=jqobs.log_histogram())
    empty = model.init(jax.random.key(0), X)
    variables = observe(model, empty, X)
    restored = flax.serialization.from_bytes(empty, flax.serialization.to_bytes(variables))
    jax.tree.map(np.testing.assert_array_equal, restored, variables)
    before = jqobs.linen.calculate_qparams(model, variables, X)["block/watch"]
    assert jqobs.linen.calculate_qparams(model, restored, X)["block/watch"].scale == before.scale


def test_a_shared_layer_adds_up():
    class Shared(nn.Module):
        @nn.compact
        def __call__(self, x):
            watch = jqobs.linen.MinMaxObserver(name="watch")
            return watch(watch(x) + 1)

    _, variables = Shared().apply({}, X, mutable=["observers"])
    state = variables["observers"]["watch"]["state"]
    assert state.seen == 2 * X.size
    assert state.max_val == jnp.max(X) + 1
