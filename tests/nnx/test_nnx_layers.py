import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqobs

X = jnp.asarray(9 - np.random.default_rng(0).exponential(1, (4, 3)).astype(np.float32))
named = pytest.mark.parametrize("case", [case for case in cases.CASES if case.linen], ids=lambda case: case.id)


class Block(nnx.Module):
    def __init__(self, watch=None, *, rngs):
        self.dense = nnx.Linear(3, 3, rngs=rngs)
        self.watch = jqobs.nnx.MinMaxObserver() if watch is None else watch()

    def __call__(self, x):
        return self.watch(self.dense(x))


def seen(module):
    return np.asarray(module.state.get_value().seen).tolist()


@named
def test_the_module_is_the_functional_observer(case):
    module = getattr(jqobs.nnx, case.linen)(**case.arguments)
    assert module(X) is X
    assert module.observer is case.build()
    state, expected = module.state.get_value(), case.build().update(case.build().init(X), X)
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, state, expected)


@named
def test_linen_and_nnx_take_the_same_arguments(case):
    linen, module = getattr(jqobs.linen, case.linen), getattr(jqobs.nnx, case.linen)
    own = {"parent", "name", "shape", "rngs"}
    assert [f for f in linen.__dataclass_fields__ if f not in own] == [
        f for f in module.__dataclass_fields__ if f not in own
    ]
    default = linen(**case.arguments), module(**case.arguments)
    assert default[0].observer is default[1].observer


@pytest.mark.parametrize("name", ["MinMaxObserver", "MovingAverageMinMaxObserver", "LogHistogramObserver"])
def test_the_usage_in_three_lines_by_call_and_by_record(name):
    called, recorded = getattr(jqobs.nnx, name)(), getattr(jqobs.nnx, name)()
    for i in range(3):
        called(X + i)
        recorded.record(X + i)
    for got, expected in zip(called.calculate_qparams(), recorded.calculate_qparams(), strict=True):
        assert got == expected
    assert called.min_val == recorded.min_val


def test_a_moving_average_moves_part_of_the_way():
    watch = jqobs.nnx.MovingAverageMinMaxObserver(averaging_constant=0.5)
    watch(jnp.array([-2.0, 2.0]))
    watch(jnp.array([-4.0, 4.0]))
    assert (watch.min_val, watch.max_val) == (-3, 3)
    slow = jqobs.nnx.MovingAverageMinMaxObserver(averaging_constant=0.1)
    slow(jnp.array([0.0, 1.0]))
    slow(jnp.array([0.0, 101.0]))
    np.testing.assert_allclose(slow.max_val, 11, rtol=1e-6)


def test_reset_is_a_fresh_module():
    for build in (jqobs.nnx.MinMaxObserver, lambda: jqobs.nnx.PerChannelMinMaxObserver(ch_axis=1, shape=X.shape)):
        module = build()
        module(X)
        module.reset()
        got, fresh = module.state.get_value(), build().state.get_value()
        assert [leaf.dtype for leaf in jax.tree.leaves(got)] == [leaf.dtype for leaf in jax.tree.leaves(fresh)]
        jax.tree.map(np.testing.assert_array_equal, got, fresh)
    lazy = jqobs.nnx.PerChannelMinMaxObserver(ch_axis=1)
    lazy(X)
    assert lazy.min_val.shape == (3,)
    lazy.reset()
    lazy(jnp.ones((2, 5)))
    assert lazy.min_val.shape == (5,)


def test_before_data():
    with pytest.raises(RuntimeError, match="min_max"):
        jqobs.nnx.MinMaxObserver().calculate_qparams()
    lazy = jqobs.nnx.PerChannelMinMaxObserver()
    with pytest.raises(RuntimeError, match="min_max"):
        lazy.calculate_qparams()
    with pytest.raises(RuntimeError, match="shape="):
        _ = lazy.min_val


def test_fixed_placeholder_noop_and_base():
    fixed = jqobs.nnx.FixedQParamsObserver(scale=1 / 256, zero_point=0)
    before = [float(leaf) for leaf in fixed.calculate_qparams()]
    fixed(X)
    assert [float(leaf) for leaf in fixed.calculate_qparams()] == before == [1 / 256, 0]
    for module in (jqobs.nnx.PlaceholderObserver(custom_op_name="embedding"), jqobs.nnx.NoopObserver()):
        assert module(X) is X
        with pytest.raises(RuntimeError, match="no scale or zero point"):
            module.calculate_qparams()
    base = jqobs.nnx.ObserverBase(jqobs.per_tensor_affine, jqobs.quint8)
    with pytest.raises(NotImplementedError, match="ObserverBase is abstract"):
        base.calculate_qparams()


def test_recipes():
    recipe = jqobs.nnx.PerChannelMinMaxObserver.with_args(ch_axis=0)
    assert type(recipe()) is jqobs.nnx.PerChannelMinMaxObserver
    assert recipe() is not recipe()
    assert repr(recipe.with_args(eps=1e-5)) == "PerChannelMinMaxObserver(ch_axis=0, eps=1e-05)"
    assert jqobs.nnx.default_observer()(X) is X
    assert jqobs.nnx.default_weight_observer().observer is jqobs.linen.default_weight_observer().observer
    assert jqobs.nnx.default_dynamic_quant_observer().is_dynamic

    @jqobs.with_args(averaging_constant=0.5)
    class Mine(jqobs.nnx.MovingAverageMinMaxObserver):
        pass

    assert Mine().averaging_constant == 0.5
    assert Mine(averaging_constant=0.1).observer is jqobs.moving_average_min_max(averaging_constant=0.1)


def test_a_bad_argument_dies_where_it_was_written():
    for arguments in ({"qscheme": "affine"}, {"qdtype": "int8"}, {"eps": 0}):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            jqobs.nnx.MinMaxObserver(**arguments)


def test_observing_is_a_view():
    model = Block(rngs=nnx.Rngs(0))
    model(X)
    before = model.watch.min_val
    off = nnx.view(model, observing=False)
    off(X - 100)
    assert model.watch.min_val == before
    nnx.view(off, observing=True)(X - 100)
    assert model.watch.min_val < before


def test_under_nnx_transformations():
    model = Block(rngs=nnx.Rngs(0))
    lazy = Block(lambda: jqobs.nnx.PerChannelMinMaxObserver(ch_axis=1), rngs=nnx.Rngs(0))
    step = nnx.jit(lambda model, x: model(x))
    for module in (model, lazy):
        step(module, X)
        step(module, X)
    assert (seen(model.watch), seen(lazy.watch)) == (24, [8, 8, 8])
    nnx.grad(lambda model: nnx.remat(lambda model, x: model(x))(model, X).sum())(model)
    assert seen(model.watch) == 36
    nnx.cond(X[0, 0] > 0, lambda m, x: m(x), lambda m, x: m(x) + 1, model, X)
    assert seen(model.watch) == 48


def test_the_gradient_is_that_without_observers():
    watched, plain = Block(rngs=nnx.Rngs(0)), Block(jqobs.nnx.NoopObserver, rngs=nnx.Rngs(0))
    got, expected = (nnx.grad(lambda model: jnp.sum(model(X) ** 2))(model)["dense"] for model in (watched, plain))
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize(
    "build", [jqobs.nnx.MinMaxObserver, jqobs.nnx.PerChannelMinMaxObserver], ids=["tensor", "channel"]
)
def test_stacked_layers_in_a_scan(build):
    make = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: Block(build, rngs=rngs), in_axes=(0,)))
    stack = make(nnx.Rngs(0))
    forward = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    forward(X, stack)
    forward(X, stack)
    shape = (3,) if build is jqobs.nnx.MinMaxObserver else (3, 4)
    assert np.asarray(stack.watch.state.get_value().seen).tolist() == np.full(shape, 24 // np.prod(shape[1:])).tolist()
    assert jqobs.nnx.calculate_qparams(stack)["watch"].scale.shape == shape


def test_the_functional_form():
    model = Block(rngs=nnx.Rngs(0))
    graph, observed, rest = nnx.split(model, jqobs.nnx.ObserverState, ...)

    @jax.jit
    def step(observed, x):
        module = nnx.merge(graph, observed, rest)
        module(x)
        return nnx.state(module, jqobs.nnx.ObserverState)

    nnx.update(model, step(step(observed, X), X))
    assert seen(model.watch) == 24
