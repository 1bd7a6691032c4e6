import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jqobs

X = jnp.asarray(np.random.default_rng(0).standard_normal((4, 3)) + 9, jnp.float32)


class Model(nnx.Module):
    """Observers of several types, under any name, in a list, and inside a layer."""

    def __init__(self):
        self.watch = jqobs.nnx.PerChannelMinMaxObserver(ch_axis=1)
        self.several = nnx.List(
            [jqobs.nnx.LogHistogramObserver(bins_per_octave=2), jqobs.nnx.Observe(jqobs.mean_min_max())]
        )
        self.rounding = jqobs.nnx.FakeQuantize(jqobs.min_max(qscheme=jqobs.per_channel_affine, ch_axis=-1))

    def __call__(self, x):
        for layer in (self.watch, *self.several, self.rounding):
            x = layer(x)
        return x


def test_round_trip_into_a_model_that_has_seen_nothing():
    model, fresh = Model(), Model()
    model(X)
    jqobs.nnx.disable_observer(model)
    state_dict = jqobs.nnx.get_observer_state_dict(model)
    assert list(state_dict)[:2] == ["rounding/min_val", "rounding/max_val"]
    assert {key.split("/")[0] for key in state_dict} == {"watch", "several", "rounding"}
    jqobs.nnx.load_observer_state_dict(fresh, state_dict)
    again = jqobs.nnx.get_observer_state_dict(fresh)
    assert list(again) == list(state_dict)
    for key, value in state_dict.items():
        assert again[key].dtype == value.dtype
        np.testing.assert_array_equal(again[key], value)
    for path, qparams in jqobs.nnx.calculate_qparams(model).items():
        np.testing.assert_array_equal(qparams.scale, jqobs.nnx.calculate_qparams(fresh)[path].scale)
    assert not fresh.rounding.flags.get_value().observer_enabled
    fresh(X)  # It goes on from there.
    assert np.asarray(fresh.watch.state.get_value().seen).tolist() == [8, 8, 8]


def test_the_model_may_be_the_observer_itself():
    observer, fresh = jqobs.nnx.MinMaxObserver(), jqobs.nnx.MinMaxObserver()
    observer(X)
    state_dict = jqobs.nnx.get_observer_state_dict(observer)
    assert "min_val" in state_dict
    jqobs.nnx.load_observer_state_dict(fresh, state_dict)
    np.testing.assert_array_equal(fresh.min_val, X.min())


def test_a_saved_dictionary_is_nobodys_buffer():
    observer = jqobs.nnx.HistogramObserver(bins=8)
    observer(X)
    state_dict = jqobs.nnx.get_observer_state_dict(observer)
    before = {key: value.copy() for key, value in state_dict.items()}
    observer(-X)
    fresh = jqobs.nnx.HistogramObserver(bins=8)
    jqobs.nnx.load_observer_state_dict(fresh, state_dict)
    nnx.jit(lambda m, x: m(x), donate_argnums=0)(fresh, -X)
    for key, value in before.items():
        np.testing.assert_array_equal(state_dict[key], value)


def test_all_that_does_not_fit_is_in_one_error():
    model, fresh = Model(), Model()
    model(X)
    state_dict = jqobs.nnx.get_observer_state_dict(model)
    before = jqobs.nnx.get_observer_state_dict(fresh)
    del state_dict["watch/max_val"]
    state_dict["wacht/max_val"] = np.zeros(3)
    state_dict["several/1/min_val"] = np.zeros(7, np.float32)
    state_dict["rounding/min_val"] = state_dict["rounding/min_val"][:2]
    with pytest.raises(ValueError, match="state_dict does not fit") as error:
        jqobs.nnx.load_observer_state_dict(fresh, state_dict)
    message = str(error.value)
    for part in ("missing watch/max_val", "unexpected wacht/max_val", r"several/1/min_val of shape (7,)"):
        assert part in message
    assert "rounding/max_val of shape (3,)" in message  # Its channels are not those of min_val.
    after = jqobs.nnx.get_observer_state_dict(fresh)
    assert list(after) == list(before)
    for key, value in before.items():
        np.testing.assert_array_equal(after[key], value)


class Layers(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = jqobs.linen.PerChannelMinMaxObserver(ch_axis=1, name="watch")(x)
        return jqobs.linen.FakeQuantize(jqobs.log_histogram(bins_per_octave=2), name="rounding")(nn.Dense(2)(x))


def test_linen():
    model = Layers()
    fresh = model.init(jax.random.key(0), X)
    _, observed = model.apply(fresh, X, mutable=["observers"])
    calibrated = jqobs.linen.read_qparams(model, {**fresh, **observed}, X)
    state_dict = jqobs.linen.get_observer_state_dict(calibrated)
    loaded = jqobs.linen.load_observer_state_dict(fresh, state_dict)
    assert loaded["params"] is fresh["params"]
    jax.tree.map(np.testing.assert_array_equal, loaded["observers"], calibrated["observers"])
    np.testing.assert_array_equal(model.apply(loaded, X), model.apply(calibrated, X))
    del state_dict["watch/max_val"]
    with pytest.raises(ValueError, match="missing watch/max_val"):
        jqobs.linen.load_observer_state_dict(fresh, state_dict)
    with pytest.raises(ValueError, match="unexpected min_val"):
        jqobs.linen.load_observer_state_dict({}, {"min_val": 1.0})


def test_a_torch_dictionary():
    """As NumPy arrays, so that torch itself is not needed."""
    there = {
        "conv.weight": np.zeros(3),
        "conv.activation_post_process.min_val": np.float32(-1),
        "conv.activation_post_process.max_val": np.float32(3),
        "quant.activation_post_process.activation_post_process.min_val": np.float32([-1, 0]),
        "quant.activation_post_process.activation_post_process.max_val": np.float32([2, 4]),
        "quant.activation_post_process.scale": np.float32([0.1, 0.2]),
        "quant.activation_post_process.zero_point": np.int64([3, 0]),
        "quant.activation_post_process.fake_quant_enabled": np.uint8([1]),
        "quant.activation_post_process.observer_enabled": np.uint8([0]),
        "unseen.activation_post_process.min_val": np.zeros(0, np.float32),
        "unseen.activation_post_process.max_val": np.zeros(0, np.float32),
    }
    converted = jqobs.convert_torch_state_dict(there, rename=lambda path: f"here/{path}")
    assert {key.split("/")[1] for key in converted} == {"conv", "quant"}
    assert converted["here/quant/zero_point"].dtype == np.int32
    assert (converted["here/quant/observer_enabled"].item(), converted["here/quant/is_calibrated"].item()) == (
        False,
        True,
    )

    class Here(nnx.Module):
        def __init__(self):
            self.conv = jqobs.nnx.MinMaxObserver()
            self.quant = jqobs.nnx.FakeQuantize(jqobs.min_max(qscheme=jqobs.per_channel_affine, ch_axis=0))

    model = Here()
    jqobs.nnx.load_observer_state_dict(model, {key.removeprefix("here/"): value for key, value in converted.items()})
    assert float(model.conv.calculate_qparams().scale) == pytest.approx(4 / 255)
    np.testing.assert_allclose(model.quant(jnp.ones((2, 1)))[1], 1.0, rtol=1e-6)


def test_what_has_seen_nothing_stays_so():
    make = lambda: nnx.List([Model(), jqobs.nnx.MinMaxObserver()])  # noqa: E731
    model, fresh = make(), make()
    model[1](X)
    jqobs.nnx.disable_fake_quant(model)
    jqobs.nnx.load_observer_state_dict(fresh, jqobs.nnx.get_observer_state_dict(model))
    np.testing.assert_array_equal(fresh[1].max_val, X.max())
    assert fresh[0].watch.state is None
    assert not fresh[0].rounding.flags.get_value().fake_quant_enabled


def test_another_granularity_does_not_fit():
    observer, fresh = jqobs.nnx.MinMaxObserver(), jqobs.nnx.PerChannelMinMaxObserver(ch_axis=1)
    observer(X)
    with pytest.raises(ValueError, match=r"min_val of shape \(\)"):
        jqobs.nnx.load_observer_state_dict(fresh, jqobs.nnx.get_observer_state_dict(observer))
    state_dict = jqobs.nnx.get_observer_state_dict(observer)
    for key, wrong in (("min_val", np.bool_(True)), ("seen/low", np.int64(2**40))):
        with pytest.raises(ValueError, match=f"does not fit: {key}"):
            jqobs.nnx.load_observer_state_dict(observer, {**state_dict, key: wrong})


def test_views_see_what_was_loaded():
    layer, other = (jqobs.nnx.FakeQuantize(jqobs.min_max()) for _ in range(2))
    view = nnx.view(layer, observing=False)
    other(X)
    jqobs.nnx.load_observer_state_dict(layer, jqobs.nnx.get_observer_state_dict(other))
    np.testing.assert_array_equal(view(X), layer(X, observer_enabled=False))
    layer.reset()
    np.testing.assert_array_equal(view(X), X)


def test_a_fixed_grid_of_torch_is_calibrated():
    there = {"fake_quant_enabled": np.uint8([1]), "observer_enabled": np.uint8([0]), "scale": np.float32([0.5])}
    layer = jqobs.nnx.FakeQuantize(jqobs.fixed_qparams(scale=0.5, zero_point=0))
    jqobs.nnx.load_observer_state_dict(layer, jqobs.convert_torch_state_dict({**there, "zero_point": np.int32([0])}))
    assert layer(jnp.array([0.7])).tolist() == [0.5]
