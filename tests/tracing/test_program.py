"""Every construct that a program can be made of: the bits of jit, and the statistics of observers placed by hand."""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.experimental import sparse

import jqobs
from jqobs.tracing import program as tracing

# --- What is placed by hand: every product of the table is made here, and what it was given goes to a list.

_recording = None


def dot(a, b, *rest, **kwargs):
    """A `dot_general` (or a plain matrix product) that records its operands while a recording runs."""
    if _recording is not None:
        for side, x in (("lhs", a), ("rhs", b)):
            jax.debug.callback(functools.partial(_note, side), x)
    return jax.lax.dot_general(a, b, *rest, **kwargs) if rest or kwargs else a @ b


def conv(a, b, *rest, **kwargs):
    if _recording is not None:
        for side, x in (("lhs", a), ("rhs", b)):
            jax.debug.callback(functools.partial(_note, side), x)
    return jax.lax.conv_general_dilated(a, b, *rest, **kwargs)


def _note(side, x):
    if _recording is not None:
        _recording[side].append(np.asarray(x, np.float32))


def record(fn, args):
    """All that the products of a function were given, from the left and from the right."""
    global _recording
    _recording = {"lhs": [], "rhs": []}
    jitted_before.clear_cache()
    try:
        jax.block_until_ready(jax.jit(lambda *args: fn(*args))(*args))  # Traced anew, with the callbacks inside.
        jax.effects_barrier()
        return _recording
    finally:
        _recording = None


# --- The functions


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape) + 0.5, dtype)


W, X = normal(4, 4), normal(3, 4, seed=1)
STACK = normal(3, 4, 4, seed=2)


def nested_jit(w, x):
    helper = jax.jit(lambda w, x: jnp.tanh(dot(x, w)))
    return helper(w, helper(w, x))


def scan_over_layers(w, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(dot(x, w)), x.sum()), x, w)


def scan_over_time(w, xs):
    return jax.lax.scan(lambda h, x: (jnp.tanh(dot(h, w) + x), h), jnp.zeros((1, 4)), xs[:, None])


def while_loop(w, x):
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(dot(c[1], w))), (0, x))[1]


def while_condition(w, x):
    return jax.lax.while_loop(lambda c: (dot(c, w).sum() < 100) & (c[0, 0] < 3), lambda c: c + 1.0, x)


def fori(w, x):
    return jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(dot(x, w[i])), x)


def cond(w, x):
    return jax.lax.cond(x.sum() > 0, lambda x: dot(x, w), lambda x: dot(x + 1, w), x)


def switch(w, x):
    return jax.lax.switch(1, [lambda x: x, lambda x: dot(x, w), lambda x: dot(dot(x, w), w)], x)


def remat(w, x):
    return jax.checkpoint(lambda x: jnp.tanh(dot(x, w)))(x)


@jax.custom_vjp
def doubled_gradient(w, x):
    return jnp.tanh(dot(x, w))


doubled_gradient.defvjp(
    lambda w, x: (doubled_gradient(w, x), (w, x)), lambda saved, g: (2 * saved[1].T @ g, 2 * g @ saved[0].T)
)


@jax.custom_jvp
def flat_gradient(w, x):
    return dot(x, w)


flat_gradient.defjvp(lambda primals, tangents: (flat_gradient(*primals), tangents[1]))


def gradient(w, x):
    return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)


def platforms(w, x):
    return jax.lax.platform_dependent(x, default=lambda x: dot(x, w), cuda=lambda x: dot(x, w) * 1)


def nest(w, x):
    def layer(x, w):
        inner = lambda x: jax.lax.cond(x.sum() > 0, lambda x: dot(x, w), lambda x: x, x)  # noqa: E731
        return jnp.tanh(jax.checkpoint(jax.jit(inner))(x)), None

    return jax.lax.scan(layer, x, w)[0]


def layers_of_time(w, xs):
    """A recurrence inside a stack."""
    step = lambda w: lambda h, x: ((h := jnp.tanh(dot(h, w) + x)), h)  # noqa: E731
    return jax.lax.scan(lambda xs, w: (jax.lax.scan(step(w), jnp.zeros((1, 4)), xs)[1], None), xs[:, None], w)[0]


def dropout(w, x):
    kept = jax.random.bernoulli(jax.random.key(3), 0.5, x.shape)
    jax.debug.callback(lambda x: None, x)
    return dot(jnp.where(kept, x, 0.0), w)


def attention(w, x):
    q = dot(x, w).reshape(1, 3, 2, 2)
    return jax.nn.dot_product_attention(q, q, q)


def ragged(w, x):
    return jax.lax.ragged_dot(x, w, jnp.array([1, 2, 0], jnp.int32))


CONV = {"window_strides": (1, 1), "padding": "SAME"}


def convs(w, x):
    """Of three layouts, grouped and transposed."""
    x = conv(x, w["hwio"], dimension_numbers=("NHWC", "HWIO", "NHWC"), **CONV)
    x = conv(x, w["oihw"], dimension_numbers=("NHWC", "OIHW", "NCHW"), feature_group_count=2, **CONV)
    transposed = {"lhs_dilation": (2, 2), "window_strides": (1, 1), "padding": [(1, 1), (1, 1)]}
    return conv(x, w["hwio"], dimension_numbers=("NCHW", "HWIO", "HWNC"), **transposed)


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, dot_general=dot)(x)
        return nn.DenseGeneral((2, 2), dot_general=dot)(nn.gelu(x))


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        body = nn.remat(nn.Dense)
        scanned = nn.scan(
            lambda module, x, _: (nn.tanh(body(4, dot_general=dot, name="dense")(x)), None),
            variable_axes={"params": 0}, split_rngs={"params": True}, length=3,
        )  # fmt: skip
        return scanned(self, x, None)[0]


MODEL = nnx.Sequential(
    nnx.Linear(4, 8, rngs=nnx.Rngs(0), dot_general=dot), nnx.relu, nnx.Linear(8, 2, rngs=nnx.Rngs(1))
)


@jax.jit
def jitted_before(w, x):
    return jnp.tanh(dot(x, w))


def linen(model, x):
    return model.init(jax.random.key(0), x), x


def called_program(w, x):
    """A program that was traced before, called: an equation of its own since jax 0.11."""
    closed = jax.make_jaxpr(lambda w, x: dot(x, w))(W, X)
    if not hasattr(jax.extend.core, "CallPrimitive"):
        (y,) = jax.extend.core.primitives.closed_call_p.bind(w, x, call_jaxpr=closed)
    else:
        (y,) = jax.extend.core.jaxpr_as_fun(closed)(w, x)
    return jnp.tanh(y)


# name: function, arguments, the number of operands, and what the observers share with those placed by hand: all, or
# only what a library passes through our `dot`.
CASES = {
    "matmul": (lambda w, x: dot(x, w), (W, X), 2),
    "weight on the left": (lambda w, x: dot(w, x.T), (W, X), 2),
    "batched": (lambda w, x: dot(x[:, None], w), (STACK, X), 2),
    "nested jit": (nested_jit, (W, X), 4),
    "jitted before": (lambda w, x: jitted_before(w, jitted_before(w, x)), (W, X), 4),
    "called program": (called_program, (W, X), 2),
    "vmap": (jax.vmap(lambda w, x: dot(x, w), (None, 0)), (W, normal(2, 3, 4)), 2),
    "vmap of a custom rule": (jax.vmap(doubled_gradient, (None, 0)), (W, normal(2, 3, 4)), 2),
    "scan over layers": (scan_over_layers, (STACK, X), 2),
    "scan over time": (scan_over_time, (W, X), 2),
    "layers of time": (layers_of_time, (STACK, X), 2),
    "while": (while_loop, (W, X), 2),
    "while condition": (while_condition, (W, X), 2),
    "fori": (fori, (STACK, X), 2),
    "cond": (cond, (W, X), 4),
    "switch": (switch, (W, X), 6),
    "remat": (remat, (W, X), 2),
    "custom vjp": (doubled_gradient, (W, X), 2),
    "custom jvp": (flat_gradient, (W, X), 2),
    "gradient": (gradient, (W, X), 4),
    "gradient of remat": (jax.grad(lambda w, x: remat(w, x).sum()), (W, X), 6),
    "platforms": (platforms, (W, X), 4),
    "nest": (nest, (STACK, X), 2),
    "random and callbacks": (dropout, (W, X), 2),
    "attention": (attention, (W, X), 6),
    "ragged": (ragged, (STACK, X), 2),
    "bf16": (lambda w, x: dot(x, w), (W.astype(jnp.bfloat16), X.astype(jnp.bfloat16)), 2),
    "int8": (
        lambda w, x: dot(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32),
        (jnp.arange(-8, 8, dtype=jnp.int8).reshape(4, 4), jnp.arange(8, dtype=jnp.int8).reshape(2, 4)),
        2,
    ),
    "convolutions": (convs, ({"hwio": normal(3, 3, 4, 4), "oihw": normal(4, 2, 3, 3)}, normal(2, 5, 5, 4)), 6),
    "linen": (Mlp().apply, linen(Mlp(), X), 4),
    "linen scan and remat": (Stack().apply, linen(Stack(), X), 2),
    "nnx": (lambda model, x: model(x), (MODEL, X), 4),
    "closed over": (lambda x: dot(x, W), (X,), 2),
}
UNRECORDED = {
    "linen scan and remat",
    "gradient",
    "gradient of remat",
    "attention",
    "ragged",
    "nnx",
    "vmap of a custom rule",
}
"""Where a library makes a product that does not go through ours, or where a callback is not what it would observe."""


@pytest.fixture(scope="module", params=CASES)
def case(request):
    fn, args, operands = CASES[request.param]
    calibration = jqobs.observe(fn, jqobs.min_max(), weight_argnums=0 if len(args) > 1 else None)
    out, state = calibration.update(calibration.init(*args), *args)
    return request.param, fn, args, operands, calibration, out, state


def test_the_bits_of_jit(case):
    _, fn, args, _, _, out, _ = case
    expected = jax.jit(lambda *args: fn(*args))(*args)
    assert jax.tree.structure(out) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one, np.float64), np.asarray(other, np.float64))


def test_every_operand_is_observed(case):
    name, _, args, operands, calibration, _, state = case
    assert len(state) == operands, str(calibration.sites(*args))
    unseen = [site for site, each in state.items() if not np.all(jqobs.is_calibrated(each))]
    # A branch that was not taken saw nothing.
    assert len(unseen) == {"cond": 2, "switch": 4, "platforms": 2}.get(name, 0), unseen


def test_statistics_are_those_of_observers_placed_by_hand(case):
    name, fn, args, _, _, _, state = case
    if name in UNRECORDED:
        pytest.skip("its products are not ours to record")
    recorded = record(fn, args)
    assert recorded["lhs"]
    for side, values in recorded.items():
        ends = [(float(v.min()), float(v.max())) for v in values]
        seen = [each for site, each in state.items() if site.endswith(side)]
        assert min(float(each.min_val.min()) for each in seen) == min(low for low, _ in ends)
        assert max(float(each.max_val.max()) for each in seen) == max(high for _, high in ends)
        assert sum(np.asarray(each.seen).sum() for each in seen) == sum(v.size for v in values)


def test_the_same_names_in_every_trace(case):
    _, fn, args, _, calibration, _, state = case
    again = jqobs.observe(fn, jqobs.min_max(), weight_argnums=0 if len(args) > 1 else None)
    assert [site.name for site in again.sites(*args)] == [site.name for site in calibration.sites(*args)]
    assert set(again.init(*args)) == set(state)
    assert not any(set(site.name) & set("*?[] ") for site in again.sites(*args))


# --- Loops


def test_a_stack_of_layers_has_a_state_for_each():
    calibration = jqobs.observe(scan_over_layers, jqobs.min_max(), weight_argnums=0)
    _, state = calibration.update(calibration.init(STACK, X), STACK, X)
    (weights,) = [each for name, each in state.items() if name.endswith("rhs")]
    np.testing.assert_array_equal(weights.min_val, STACK.min((1, 2)))
    assert [site.stack for site in calibration.sites(STACK, X)] == [(3,), (3,)]


def test_a_recurrence_has_one_state_whatever_its_length():
    calibration = jqobs.observe(scan_over_time, jqobs.min_max(), weight_argnums=0)
    state = calibration.init(W, X)
    _, state = calibration.update(state, W, X)
    _, state = calibration.update(state, W, jnp.concatenate([X, X]))
    assert {int(each.seen) for name, each in state.items() if name.endswith("lhs")} == {4 * (3 + 6)}


def test_a_recurrence_inside_a_stack():
    calibration = jqobs.observe(layers_of_time, jqobs.min_max(), weight_argnums=0)
    (left, right) = calibration.sites(STACK, X)
    assert (left.loops, left.stack, right.stack) == ((3, 3), (3,), (3,))


def test_explicit_and_automatic_axes():
    for kind in (jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto):
        mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
        with jax.set_mesh(mesh):
            x = jax.device_put(normal(8, 4), jax.sharding.NamedSharding(mesh, jax.P("data")))
            stack = jax.device_put(STACK, jax.sharding.NamedSharding(mesh, jax.P()))
            calibration = jqobs.observe(scan_over_layers, jqobs.log_histogram(bins_per_octave=2), weight_argnums=0)
            out, state = calibration.update(calibration.init(stack, x), stack, x)
            expected = jax.jit(scan_over_layers)(stack, x)
        alone = jqobs.observe(scan_over_layers, jqobs.log_histogram(bins_per_octave=2), weight_argnums=0)
        arguments = jax.device_get((stack, x))
        _, single = alone.update(alone.init(*arguments), *arguments)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(out), jax.device_get(expected))
        (left, right) = state
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(state[right]), jax.device_get(single[right]))
        assert np.asarray(state[left].seen).tolist() == np.asarray(single[left].seen).tolist()


def test_update_under_grad_and_vmap():
    calibration = jqobs.observe(nest, jqobs.min_max(), weight_argnums=0)
    state = calibration.init(STACK, X)

    def loss(w, state, x):
        out, state = calibration.update(state, w, x)
        return out.sum(), state

    gradient, after = jax.jit(jax.grad(loss, has_aux=True))(STACK, state, X)
    np.testing.assert_allclose(gradient, jax.grad(lambda w, x: nest(w, x).sum())(STACK, X), rtol=1e-4)
    _, expected = calibration.update(state, STACK, X)
    jax.tree.map(np.testing.assert_array_equal, after, expected)
    xs = jnp.stack([X, X + 1])
    outs, states = jax.vmap(lambda x: calibration.update(state, STACK, x))(xs)
    np.testing.assert_allclose(outs, jax.vmap(nest, (None, 0))(STACK, xs), rtol=1e-6)
    assert {each.seen.low.shape for each in states.values()} == {(2, 3)}


# --- What nobody can look into


def sharded(w, x):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    inside = jax.shard_map(lambda w, x: x @ w, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P("data"))
    with jax.named_scope("experts"):
        return inside(w, x @ w)


def test_shard_map_is_reported():
    calibration = jqobs.observe(sharded, jqobs.min_max(), weight_argnums=0)
    args = W, normal(4, 4)
    assert calibration.sites(*args).opaque_calls == ("experts/shard_map",)
    assert "not seen: what is inside experts/shard_map" in str(calibration.sites(*args))
    _, state = calibration.update(calibration.init(*args), *args)
    with pytest.warns(UserWarning, match="experts/shard_map"):
        assert len(calibration.calculate_qparams(state)) == 2


def test_pallas_is_reported():
    from jax.experimental import pallas as pl

    def kernel(x, w, out):
        out[...] = x[...] @ w[...]

    def fn(w, x):
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((4, 4), jnp.float32), interpret=True)(x, w)

    with pytest.warns(UserWarning, match="'fn' has no product .*outside pallas_call.*nothing to watch"):
        sites = jqobs.observe(fn, jqobs.min_max(), weight_argnums=0).sites(W, normal(4, 4))
    assert sites.opaque_calls == ("pallas_call",)


def test_sparse_products_are_reported():
    def fn(w, x):
        return sparse.BCOO.fromdense(x, nse=4) @ (w @ w), x @ w

    calibration = jqobs.observe(fn, jqobs.min_max(), weight_argnums=0)
    sites = calibration.sites(W, X)
    assert sites.opaque_calls == ("bcoo_dot_general",)
    assert "not seen: what is inside bcoo_dot_general" in str(sites)
    _, state = calibration.update(calibration.init(W, X), W, X)
    with pytest.warns(UserWarning, match="nothing was seen inside bcoo_dot_general"):
        assert len(calibration.calculate_qparams(state)) == 4


def test_a_function_without_products_has_nothing_to_watch():
    calibration = jqobs.observe(lambda x: x + 1, jqobs.min_max())
    for call in (calibration.sites, calibration.init):
        with pytest.warns(UserWarning, match="has no product .*: there is nothing to watch"):
            assert not len(call(X))
    with pytest.warns(UserWarning, match="nothing to watch"):
        out, state = calibration.update(calibration.init(X), X)
    np.testing.assert_array_equal(out, X + 1)
    assert not len(state)


def test_an_unknown_layout_says_which_jax_it_met():
    equation = jax.make_jaxpr(scan_over_layers)(STACK, X).eqns[-1]
    assert equation.primitive.name == "scan"
    stranger = equation.replace(params={"jaxpr": equation.params["jaxpr"], "length": 3})
    with pytest.raises(NotImplementedError, match=rf"jax 0\.10 to 0\.12; this is jax {jax.__version__}.*scan"):
        tracing._Scan.parts(stranger)
    with pytest.raises(NotImplementedError, match="int is not among them"):
        tracing._open(3)
