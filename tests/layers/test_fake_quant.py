"""What `FakeQuantize` promises, in Linen and in NNX alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jqobs

X = jnp.array([-1.0, 0.3, 3.0])
WILD = 100 * X


class Linen:
    """The stateful face of a Linen layer, so that both are asked the same."""

    space = jqobs.linen

    def __init__(self, observer, **options):
        self.layer = jqobs.linen.FakeQuantize(observer, **options)
        self.variables = {}

    def __call__(self, x, **options):
        y, self.variables = self.layer.apply(self.variables, x, mutable=["observers"], **options)
        return y

    def look(self, x):
        return self.layer.apply(self.variables, x)

    def do(self, method):
        _, self.variables = self.layer.apply(self.variables, method=method, mutable=["observers"])

    def state(self):
        return self.variables["observers"]

    def calculate_qparams(self):
        return jqobs.linen.calculate_qparams(self.layer, self.variables, X)[""]


class Nnx:
    space = jqobs.nnx

    def __init__(self, observer, **options):
        self.layer = jqobs.nnx.FakeQuantize(observer, **options)

    def __call__(self, x, **options):
        return self.layer(x, **options)

    def look(self, x):
        return self.layer(x, observer_enabled=False)

    def do(self, method):
        getattr(self.layer, method)()

    def state(self):
        return {name: getattr(self.layer, name).get_value() for name in ("state", "cached_qparams", "flags")}

    def calculate_qparams(self):
        return jqobs.nnx.calculate_qparams(self.layer)[""]


both = pytest.mark.parametrize("face", [Linen, Nnx])


@both
@pytest.mark.parametrize("kind", ["functional", "class", "recipe"])
def test_it_wraps_whatever_makes_an_observer(face, kind):
    cls = face.space.MinMaxObserver
    observer = {"functional": jqobs.min_max(), "class": cls, "recipe": cls.with_args(qdtype=jqobs.quint8)}[kind]
    layer = face(observer)
    out = layer(X)
    expected = jqobs.fake_quantize(
        X, jqobs.calculate_qparams(-1.0, 3.0, jqobs.QuantSpec(jqobs.quint8, jqobs.per_tensor_affine))
    )
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(layer.calculate_qparams().scale, layer.state()["cached_qparams"].scale)


@both
def test_a_layer_in_place_of_a_recipe(face):
    with pytest.raises(ValueError, match=r"write MinMaxObserver\.with_args"):
        face(face.space.MinMaxObserver())
    with pytest.raises(ValueError, match="observer must be an Observer"):
        face(None)


@both
def test_the_seeds_example(face):
    """Observing and quantizing; observer off: a wild batch does not move the scale; fake quantization off: identity."""
    layer = face(jqobs.min_max(qdtype=jqobs.quint2))
    np.testing.assert_allclose(layer(X), [-4 / 3, 0, 8 / 3], rtol=1e-6)
    before = layer.state()["cached_qparams"].scale
    layer.do("disable_observer")
    layer(WILD)
    np.testing.assert_array_equal(layer.state()["cached_qparams"].scale, before)
    assert int(layer.state()["state"].seen) == 3
    layer.do("disable_fake_quant")
    np.testing.assert_array_equal(layer(WILD), WILD)
    layer.do("enable_fake_quant")
    gradient = jax.grad(lambda x: layer.look(x).sum())(jnp.array([-9.0, 0.2, 9.0]))
    assert gradient.tolist() == [0.0, 1.0, 0.0]
    layer.do("enable_observer")
    layer(WILD)
    assert float(layer.state()["cached_qparams"].scale) > 50 * float(before)


@both
def test_it_is_the_identity_until_it_has_seen_data(face):
    layer = face(jqobs.min_max())
    np.testing.assert_array_equal(layer(X, observer_enabled=False), X)
    np.testing.assert_array_equal(layer(jnp.full(3, jnp.nan)), jnp.full(3, jnp.nan))
    assert not bool(layer.state()["cached_qparams"].is_calibrated)
    assert layer(X).tolist() != X.tolist()


@both
def test_a_call_may_override_the_switches(face):
    layer = face(jqobs.min_max(qdtype=jqobs.quint2))
    layer(X)
    assert int(layer.state()["state"].seen) == 3
    for off in (False, np.bool_(False), jnp.array(False)):
        layer(WILD, observer_enabled=off)
        assert int(layer.state()["state"].seen) == 3
    np.testing.assert_array_equal(layer(X, fake_quant_enabled=False), X)
    layer.do("disable_fake_quant")
    assert layer(X, fake_quant_enabled=True).tolist() != X.tolist()


@both
def test_masks(face):
    layer = face(jqobs.min_max())
    layer(jnp.array([1.0, 1e9]), mask=jnp.array([True, False]))
    assert float(layer.state()["state"].max_val) == 1.0


@both
def test_no_search_inside_a_step_unless_asked(face):
    lazy, eager = face(jqobs.log_histogram()), face(jqobs.log_histogram(), update_qparams=True)
    np.testing.assert_array_equal(lazy(X), X)
    assert eager(X).tolist() != X.tolist()
    lazy.do("read_qparams")
    np.testing.assert_array_equal(lazy.look(X), eager.look(X))


@both
def test_observers_that_need_no_data(face):
    layer = face(jqobs.fixed_qparams(scale=1 / 256, zero_point=0))
    out = layer(jnp.array([0.0, 0.5, 1.0, -1.0, 2.0]))
    assert out.tolist() == [0.0, 0.5, 0.99609375, 0.0, 0.99609375]  # Case 40: never -1..1 for a sigmoid.
    with pytest.raises(RuntimeError, match="noop"):
        face(jqobs.noop())(X)


@both
def test_a_custom_range_reaches_the_rounding(face):
    import dataclasses

    layer = face(jqobs.min_max(qdtype=dataclasses.replace(jqobs.quint8, quant_max=127)))
    layer(jnp.array([0.0, 12.7]))
    scale, zero_point = layer.calculate_qparams()
    np.testing.assert_allclose(scale, 0.1, rtol=1e-6)
    assert int(zero_point) == 0
    assert float(layer.look(jnp.array([99.0]))[0]) == pytest.approx(12.7)


def test_a_linen_layer_without_its_collection_is_not_there():
    layer = jqobs.linen.FakeQuantize(jqobs.min_max())
    assert layer.apply({}, X) is X
    variables = layer.init(jax.random.key(0), X)
    assert int(variables["observers"]["state"].seen) == 0
    np.testing.assert_array_equal(layer.apply(variables, X), X)


def test_switching_compiles_nothing(traces):
    layer = jqobs.linen.FakeQuantize(jqobs.min_max())
    step = jax.jit(traces(lambda variables, x: layer.apply(variables, x, mutable=["observers"])))
    counted = []
    variables = layer.init(jax.random.key(0), X)
    for change in (
        lambda v: v,
        jqobs.linen.disable_observer,
        jqobs.linen.disable_fake_quant,
        jqobs.linen.enable_observer,
    ):
        _, variables = step(change(variables), X)
        counted.append(int(variables["observers"]["state"].seen))
    assert counted == [3, 3, 3, 6]
    assert step.__wrapped__.count == 1

    model = jqobs.nnx.FakeQuantize(jqobs.min_max())
    run = traces(lambda model, x: model(x))
    jitted = nnx.jit(run)
    for change in (lambda m: None, jqobs.nnx.disable_observer, jqobs.nnx.disable_fake_quant, jqobs.nnx.enable_observer):
        change(model)
        jitted(model, X)
    assert (int(model.state.get_value().seen), run.count) == (6, 1)


def test_the_switches_of_a_model_are_saved_with_it():
    model = nn.Sequential([jqobs.linen.FakeQuantize(jqobs.min_max()), nn.Dense(2)])
    variables = jqobs.linen.disable_fake_quant(model.init(jax.random.key(0), X))
    state_dict = jqobs.linen.get_observer_state_dict(variables)
    loaded = jqobs.linen.load_observer_state_dict(model.init(jax.random.key(0), X), state_dict)
    assert not loaded["observers"]["layers_0"]["flags"].fake_quant_enabled
    assert loaded["observers"]["layers_0"]["flags"].observer_enabled
    assert "layers_0" in jqobs.report(variables["observers"])
    assert "cached_qparams" not in jqobs.report(variables["observers"])


def test_learned_scale_is_the_formula_of_the_paper():
    import dataclasses

    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((4, 6)), jnp.float32)
    for scheme, axis in ((jqobs.per_tensor_symmetric, None), (jqobs.per_channel_affine, 0)):
        shape = () if axis is None else (4,)
        qparams = jqobs.calculate_qparams(
            jnp.full(shape, -1.0), jnp.full(shape, 1.5), jqobs.QuantSpec(jqobs.qint4, scheme, ch_axis=axis)
        )
        learned = lambda x, scale: jqobs.lsq_fake_quantize(x, dataclasses.replace(qparams, scale=scale))  # noqa: B023, E731
        np.testing.assert_array_equal(learned(x, qparams.scale), jqobs.fake_quantize(x, qparams))
        gradient = jax.grad(lambda scale: learned(x, scale).sum())(qparams.scale)  # noqa: B023
        scale, zero = (np.float64(each).reshape(-1, *[1] * (axis is not None)) for each in qparams)
        v, low, high = np.float64(x) / scale, -8 - zero, 7 - zero
        slope = np.where(v <= low - 0.5, low, np.where(v >= high + 0.5, high, np.rint(v) - v))
        expected = slope.sum(None if axis is None else 1) / np.sqrt(x.size / max(qparams.scale.size, 1) * 7)
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(
            jax.grad(lambda x: learned(x, qparams.scale).sum())(x),  # noqa: B023
            jax.grad(lambda x: jqobs.fake_quantize(x, qparams).sum())(x),  # noqa: B023
        )
    with pytest.raises(ValueError, match="x must be floating"):
        jqobs.lsq_fake_quantize(jnp.arange(3), qparams)


def test_learning_a_scale_lowers_the_error():
    import dataclasses

    import optax

    x = jnp.asarray(np.random.default_rng(1).standard_normal(2000), jnp.float32)
    observer = jqobs.min_max(qscheme=jqobs.per_tensor_symmetric, qdtype=jqobs.qint4)
    qparams = observer.calculate_qparams(observer.update(observer.init(x), x))
    error = lambda scale: ((jqobs.lsq_fake_quantize(x, dataclasses.replace(qparams, scale=scale)) - x) ** 2).mean()  # noqa: E731
    optimizer, scale = optax.sgd(0.5), qparams.scale
    moments = optimizer.init(scale)

    @jax.jit
    def step(scale, moments):
        updates, moments = optimizer.update(jax.grad(error)(scale), moments)
        return optax.apply_updates(scale, updates), moments

    for _ in range(200):
        scale, moments = step(scale, moments)
    assert float(error(scale)) < 0.8 * float(error(qparams.scale))
