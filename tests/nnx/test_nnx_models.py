import jax.numpy as jnp
import pytest
from flax import nnx

import jqobs

X = jnp.ones((4, 3))


class Model(nnx.Module):
    """Observers under names of their own, in a list, and one that is not used."""

    def __init__(self):
        self.parts = nnx.List([nnx.Linear(3, 3, rngs=nnx.Rngs(0)), jqobs.nnx.Observe(jqobs.log_histogram())])
        self.my_own_name = jqobs.nnx.PerChannelMinMaxObserver(ch_axis=-1)
        self.idle = jqobs.nnx.PerChannelMinMaxObserver()
        self.ignored = jqobs.nnx.NoopObserver()

    def __call__(self, x):
        return self.ignored(self.my_own_name(self.parts[1](self.parts[0](x))))


def test_observers_are_found_by_type_and_named_by_path():
    model = Model()
    model(X)
    with pytest.warns(UserWarning, match="1 of 4 observers .*: idle$"):
        qparams = jqobs.nnx.calculate_qparams(model)
    assert {path: grid.scale.shape for path, grid in qparams.items()} == {"parts/1": (), "my_own_name": (3,)}
    with pytest.raises(jqobs.NotCalibratedError, match="recorded nothing: idle"):
        jqobs.nnx.check_observed(model)


def test_a_model_may_be_an_observer_itself():
    model = jqobs.nnx.MinMaxObserver()
    model(X)
    assert list(jqobs.nnx.calculate_qparams(model)) == [""]
    jqobs.nnx.check_observed(model)


def test_nobody_saw_anything():
    with pytest.raises(jqobs.NotCalibratedError, match="idle"):
        jqobs.nnx.calculate_qparams(Model())
