import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jqobs

X = jnp.asarray(9 - np.random.default_rng(0).exponential(1, (4, 3)).astype(np.float32))
named = pytest.mark.parametrize("case", [case for case in cases.CASES if case.linen], ids=lambda case: case.id)


class Block(nn.Module):
    observer: jqobs.Observer | None = jqobs.min_max()

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(3, name="dense")(x)
        return jqobs.linen.Observe(self.observer, name="watch")(x) if self.observer else x


class Twice(nn.Module):
    """A block under a transformation of Linen."""

    how: str
    observer: jqobs.Observer | None = jqobs.min_max()
    axes: tuple = ("params", "observers")

    @nn.compact
    def __call__(self, x):
        block = {
            "plain": Block,
            "jit": nn.jit(Block),
            "remat": nn.remat(Block),
            "vmap": nn.vmap(Block, in_axes=0, variable_axes=dict.fromkeys(self.axes, 0), split_rngs={"params": True}),
        }
        if self.how in block:
            return block[self.how](self.observer, name="block")(x)
        if self.how == "cond":
            return nn.cond(x[0, 0] > 0, lambda m, x: m(x), lambda m, x: m(x) + 1, Block(self.observer, name="block"), x)

        def body(self, carry, _):
            return self(carry), None

        scan = nn.scan(
            body,
            variable_axes=dict.fromkeys(self.axes, 0),
            split_rngs={"params": True},
            length=3,
            variable_broadcast=False,
        )
        return scan(Block(self.observer, name="block"), x, None)[0]


def observe(model, variables, x, times=1):
    step = jax.jit(lambda variables, x: model.apply(variables, x, mutable=["observers"]))
    for _ in range(times):
        _, update = step(variables, x)
        variables = {**variables, **update}
    return variables


@named
def test_the_layer_is_the_functional_observer(case):
    layer = getattr(jqobs.linen, case.linen)(**case.arguments)
    y, variables = layer.apply({}, X, mutable=["observers"])
    assert y is X
    assert layer.observer is case.build()
    state, expected = variables["observers"]["state"], case.build().update(case.build().init(X), X)
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    if "qparams" not in repr(type(state)) and case.needs_data:
        assert (
            layer.apply(variables, method="calculate_qparams").scale == case.build().calculate_qparams(expected).scale
        )


def test_defaults_are_those_of_the_seeds():
    tensor, channel = jqobs.linen.MinMaxObserver(), jqobs.linen.PerChannelMinMaxObserver()
    assert (tensor.qscheme, tensor.qdtype, tensor.ch_axis) == (jqobs.per_tensor_affine, jqobs.quint8, None)
    assert (channel.qscheme, channel.qdtype, channel.ch_axis) == (jqobs.per_channel_symmetric, jqobs.qint8, 0)
    assert jqobs.linen.MovingAverageMinMaxObserver().averaging_constant == 0.01
    assert jqobs.linen.MovingAveragePerChannelMinMaxObserver().ch_axis == 0
    assert jqobs.linen.MinMaxObserver(ch_axis=1).ch_axis is None
    assert jqobs.linen.MinMaxObserver(jqobs.per_channel_affine, jqobs.qint4, 1, 1e-5).observer is jqobs.min_max(
        qscheme=jqobs.per_channel_affine, qdtype=jqobs.qint4, ch_axis=1, eps=1e-5
    )


def test_a_bad_argument_dies_where_it_was_written():
    for arguments in ({"qscheme": "affine"}, {"qdtype": "int8"}, {"eps": 0}):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            jqobs.linen.MinMaxObserver(**arguments)
    for constant in (0, 1.5, -1):
        with pytest.raises(ValueError, match="averaging_constant"):
            jqobs.linen.MovingAverageMinMaxObserver(averaging_constant=constant)


def test_the_base_class_is_abstract():
    base = jqobs.linen.ObserverBase(jqobs.per_tensor_affine, jqobs.quint8)
    with pytest.raises(NotImplementedError, match="ObserverBase is abstract"):
        base.apply({}, method="calculate_qparams")


def test_recipes():
    recipe = jqobs.linen.PerChannelMinMaxObserver.with_args(ch_axis=0)
    assert type(recipe()) is jqobs.linen.PerChannelMinMaxObserver
    assert recipe.with_args(ch_axis=1)().ch_axis == 1
    assert repr(recipe) == "PerChannelMinMaxObserver(ch_axis=0)"
    assert (jqobs.linen.default_observer().qdtype.quant_min, jqobs.linen.default_observer().qdtype.quant_max) == (
        0,
        127,
    )
    weight = jqobs.linen.default_weight_observer()
    assert (weight.qdtype, weight.qscheme) == (jqobs.qint8, jqobs.per_tensor_symmetric)
    assert isinstance(jqobs.linen.default_dynamic_quant_observer(), jqobs.linen.PlaceholderObserver)


def test_placeholder_and_noop_say_why():
    for layer in (jqobs.linen.PlaceholderObserver(custom_op_name="embedding"), jqobs.linen.NoopObserver()):
        y, variables = layer.apply({}, X, mutable=["observers"])
        assert y is X
        with pytest.raises(RuntimeError, match="no scale or zero point"):
            layer.apply(variables, method="calculate_qparams")


def test_init_counts_nothing():
    variables = jqobs.linen.MinMaxObserver().init(jax.random.key(0), jnp.array([-3.0, 1.0]))
    state = variables["observers"]["state"]
    assert (state.min_val, state.max_val, int(state.seen)) == (jnp.inf, -jnp.inf, 0)


def test_without_a_mutable_collection_nothing_is_traced():
    layer = jqobs.linen.MinMaxObserver()
    variables = observe(layer, layer.init(jax.random.key(0), X), X)
    for given in (variables, {}):
        assert not jax.make_jaxpr(layer.apply)(given, X).jaxpr.eqns
        assert layer.apply(given, X) is X


@pytest.mark.parametrize("how", ["plain", "jit", "remat", "cond"])
def test_counts_are_right_under_transformations(how):
    model = Twice(how)
    variables = observe(model, model.init(jax.random.key(0), X), X, times=2)
    state = variables["observers"]["block"]["watch"]["state"]
    assert state.seen == 2 * X.size
    dense = Block(None).apply({"params": variables["params"]["block"]}, X)
    np.testing.assert_allclose([state.min_val, state.max_val], [dense.min(), dense.max()], rtol=1e-6)


@pytest.mark.parametrize("how", ["vmap", "scan"])
def test_stacks_have_a_state_a_slice(how):
    model, x = Twice(how), X
    variables = observe(model, model.init(jax.random.key(0), x), x, times=2)
    state = variables["observers"]["block"]["watch"]["state"]
    n, each = (4, 3) if how == "vmap" else (3, 12)
    assert np.asarray(state.seen).tolist() == [2 * each] * n
    qparams = jqobs.linen.calculate_qparams(model, variables, x)
    assert list(qparams) == ["block/watch"]
    assert qparams["block/watch"].scale.shape == (n,)
    for i in range(n):
        one = jax.tree.map(lambda leaf, i=i: leaf[i], state)
        assert qparams["block/watch"].scale[i] == jqobs.min_max().calculate_qparams(one).scale


def test_three_doublings_in_a_scan():
    class Double(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return jqobs.linen.MinMaxObserver(name="watch")(2 * x), None

    x = jnp.array([-3.0, 1.0])
    stacked = nn.scan(Double, variable_axes={"observers": 0}, length=3)()
    _, variables = stacked.apply(stacked.init(jax.random.key(0), x, None), x, None, mutable=["observers"])
    assert variables["observers"]["watch"]["state"].min_val.tolist() == [-6, -12, -24]
    carried = nn.scan(Double, variable_carry="observers", length=3)()
    state = {"observers": {"watch": {"state": jqobs.min_max().init(x)}}}
    _, variables = carried.apply(state, x, None, mutable=["observers"])
    assert variables["observers"]["watch"]["state"].min_val == -24


@pytest.mark.parametrize("how", ["plain", "jit", "remat", "scan"])
def test_the_gradient_is_that_without_observers(how):
    watched, plain = Twice(how), Twice(how, observer=None)
    variables = watched.init(jax.random.key(0), X)

    def loss(params, model):
        y, _ = model.apply({**variables, "params": params}, X, mutable=["observers"])
        return jnp.sum(y**2)

    got, expected = (
        jax.jit(jax.grad(loss), static_argnums=1)(variables["params"], model) for model in (watched, plain)
    )
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_a_mask_reaches_the_observer():
    layer = jqobs.linen.Observe(jqobs.min_max())
    _, variables = layer.apply({}, X, jnp.arange(4)[:, None] < 1, mutable=["observers"])
    assert variables["observers"]["state"].seen == 3
