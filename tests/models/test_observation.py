import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jqobs

PER_CHANNEL = jqobs.min_max(qscheme=jqobs.per_channel_symmetric, qdtype=jqobs.qint8)
CONFIG = jqobs.QConfig(activation=jqobs.min_max(), weight=PER_CHANNEL)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape) + 0.5, jnp.float32)


def mlp(params, x):
    return jnp.tanh(x @ params["up"]["kernel"]) @ params["down"]["kernel"]


PARAMS = {"up": {"kernel": normal(4, 6)}, "down": {"kernel": normal(6, 2)}}
X = normal(5, 4, seed=1)


def calibrated(fn, observers, *args, **kwargs):
    calibration = jqobs.observe(fn, observers, **{"weight_argnums": 0, **kwargs})
    _, state = calibration.update(calibration.init(*args), *args)
    return calibration, state


# --- Names and kinds


def test_the_table():
    calibration = jqobs.observe(mlp, CONFIG, weight_argnums=0)
    assert str(calibration.sites(PARAMS, X)).splitlines() == [
        "site      primitive    side  kind        shape   dtype    ch_axis",
        "up/lhs    dot_general  lhs   activation  (5, 4)  float32        -",
        "up/rhs    dot_general  rhs   weight      (4, 6)  float32        1",
        "down/lhs  dot_general  lhs   activation  (5, 6)  float32        -",
        "down/rhs  dot_general  rhs   weight      (6, 2)  float32        1",
    ]


def test_only_shapes_are_needed():
    calibration = jqobs.observe(mlp, CONFIG, weight_argnums=0)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (PARAMS, X))
    assert [site.name for site in calibration.sites(*shapes)] == ["up/lhs", "up/rhs", "down/lhs", "down/rhs"]
    assert calibration.init(*shapes)["up/rhs"].min_val.shape == (6,)


def transposed(params, x):
    weight = jnp.broadcast_to(params["layers"][1]["w"].T.reshape(6, 4).astype(jnp.bfloat16), (6, 4))
    return x.astype(jnp.bfloat16) @ weight.T


@pytest.mark.parametrize(
    ("fn", "args", "names"),
    [
        (transposed, ({"layers": [{}, {"w": normal(4, 6)}]}, X), ["layers/1"]),
        (lambda w, x: x @ w, (normal(4, 6), X), ["w"]),
        (lambda params, x: x @ params["a"] @ params["a"], ({"a": normal(4, 4)}, X), ["a", "a_1"]),
        (lambda params, x: x @ params["a*[b"], ({"a*[b": normal(4, 4)}, X), ["a__b"]),
        (lambda params, x: x @ params["layers"][2], ({"layers": normal(3, 4, 4)}, X), ["layers"]),
        (lambda params, x: x @ x.T, ({}, X), ["x"]),
    ],
)
def test_names_come_from_the_leaf_that_feeds_a_weight(fn, args, names):
    assert (
        list(dict.fromkeys(site.operation for site in jqobs.observe(fn, CONFIG, weight_argnums=0).sites(*args)))
        == names
    )


def test_a_scope_of_the_user_stands_in_front():
    def fn(params, x):
        with jax.named_scope("encoder"):
            return mlp(params, x)

    sites = jqobs.observe(fn, CONFIG, weight_argnums=0).sites(PARAMS, X)
    assert [site.operation for site in sites][::2] == ["encoder/up", "encoder/down"]


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, name="embed")(x)
        return nn.MultiHeadDotProductAttention(num_heads=2)(x)


def test_linen_paths():
    model, x = Attention(), normal(2, 3, 4)
    variables = model.init(jax.random.key(0), x)
    attention = "MultiHeadDotProductAttention_0"
    expected = [
        "embed",
        *(f"{attention}/{name}" for name in ["query", "key", "value", "qhd,khd->hqk", "hqk,khd->qhd", "out"]),
    ]
    for fn, args in ((model.apply, (variables, x)), (lambda x: model.apply(variables, x), (x,))):
        sites = jqobs.observe(fn, CONFIG, weight_argnums=0 if len(args) == 2 else None).sites(*args)
        assert list(dict.fromkeys(site.operation for site in sites)) == expected
        assert [site.name for site in sites if site.is_weight] == [
            f"{name}/rhs" for name in expected if "->" not in name
        ]


def test_nnx_paths():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
            self.attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)

        def __call__(self, x):
            for layer in self.layers:
                x = nnx.relu(layer(x))
            return self.attention(x)

    model, x = Block(nnx.Rngs(0)), normal(2, 3, 4)
    graph, variables = nnx.split(model)
    names = ["query", "key", "value", "BTNH,BSNH->BNTS", "BNTS,BSNH->BTNH", "out"]
    expected = ["layers/0", "layers/1", *(f"attention/{name}" for name in names)]
    for fn, args in (
        (lambda model, x: model(x), (model, x)),
        (lambda variables, x: nnx.merge(graph, variables)(x), (variables, x)),
        (lambda x: model(x), (x,)),
    ):
        sites = jqobs.observe(fn, CONFIG, weight_argnums=0 if len(args) == 2 else None).sites(*args)
        assert sorted({site.operation for site in sites}) == sorted(expected)
        assert sum(site.is_weight for site in sites) == 6


def test_params_as_a_predicate_and_as_numbers():
    def fn(x, variables):
        return x @ variables["params"]["a"] @ variables["stats"]["b"]

    args = X, {"params": {"a": normal(4, 4)}, "stats": {"b": normal(4, 4)}}
    weights = {}
    for params in (lambda path: path.startswith("variables/params/"), 1, (-1,), [1]):
        sites = jqobs.observe(fn, jqobs.min_max(), weight_argnums=params).sites(*args)
        weights[repr(params)] = [site.name for site in sites if site.is_weight]
    assert list(weights.values()) == [["a/rhs"], *[["a/rhs", "stats/b/rhs"]] * 3]
    for wrong in (2, True, "x", (0, 5)):
        with pytest.raises(ValueError, match="weight_argnums must be numbers of the 2 arguments"):
            jqobs.observe(fn, jqobs.min_max(), weight_argnums=wrong).sites(*args)


def test_what_is_made_of_parameters_alone_is_a_weight():
    def fn(params, x, scale):
        return (x @ (params["a"] * jnp.tanh(params["b"])[None])) @ (params["a"] * scale)

    args = {"a": normal(4, 4), "b": normal(4)}, X, jnp.float32(2.0)
    kinds = [site.is_weight for site in jqobs.observe(fn, jqobs.min_max(), weight_argnums=0).sites(*args)]
    assert kinds == [False, True, False, False]


def test_flags_and_strings_are_part_of_the_program():
    def fn(params, x, kind, twice=False):
        y = mlp(params, x) if kind == "mlp" else x
        return y @ y.T if twice else y

    calibration, state = calibrated(fn, CONFIG, PARAMS, X, "mlp", True)
    out, _ = calibration.update(state, PARAMS, X, "mlp", twice=True)
    assert (len(state), out.shape) == (6, (5, 5))


# --- Observers


@pytest.mark.parametrize(
    ("numbers", "kernel", "axis"),
    [
        (("NHWC", "HWIO", "NHWC"), (3, 3, 2, 6), 3),
        (("NCHW", "OIHW", "NCHW"), (6, 2, 3, 3), 0),
        (("NHWC", "OHWI", "NHWC"), (6, 3, 3, 2), 0),
    ],
)
def test_the_channel_axis_of_convolutions(numbers, kernel, axis):
    def fn(w, x):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=2)

    x = normal(*((1, 5, 5, 4) if numbers[0] == "NHWC" else (1, 4, 5, 5)))
    w = normal(*kernel)
    calibration, state = calibrated(fn, CONFIG, w, x)
    other = tuple(i for i in range(4) if i != axis)
    np.testing.assert_array_equal(state["w/rhs"].max_val, w.max(other))
    assert calibration.calculate_qparams(state)["w/rhs"].ch_axis == axis


def test_the_channel_axis_of_transposed_convolutions():
    """Its kernel may be given with the roles of input and output exchanged; the operation knows."""
    for exchanged in (False, True):
        w = normal(3, 3, *((6, 4) if exchanged else (4, 6)))
        fn = lambda w, x, e=exchanged: jax.lax.conv_transpose(x, w, (2, 2), "SAME", transpose_kernel=e)  # noqa: E731
        _, state = calibrated(fn, CONFIG, w, normal(1, 5, 5, 4))
        np.testing.assert_array_equal(state["w/rhs"].max_val, w.max((0, 1, 2 + exchanged)))


def test_the_channel_axis_of_products():
    def fn(params, x):
        y = params["left"] @ x.T  # (6, 4) (4, 5): its last free axis is the first.
        experts = jnp.einsum("etc,ecf->etf", jnp.stack([x, x]), params["experts"])
        routed = jax.lax.ragged_dot(x, params["experts"], jnp.array([2, 3], jnp.int32))
        return y, experts, routed, x @ params["vector"]

    params = {"left": normal(6, 4), "experts": normal(2, 4, 3), "vector": normal(4)}
    calibration, state = calibrated(fn, CONFIG, params, X)
    axes = {site.name: site.ch_axis for site in calibration.sites(params, X) if site.is_weight}
    assert axes == {"left/lhs": 0, "experts/rhs": 2, "experts_1/rhs": 2, "vector/rhs": None}
    np.testing.assert_array_equal(state["left/lhs"].max_val, params["left"].max(1))
    np.testing.assert_array_equal(state["experts_1/rhs"].max_val, params["experts"].max((0, 1)))
    assert state["vector/rhs"].max_val.shape == ()


def test_groups_of_a_weight():
    observer = PER_CHANNEL.replace(group_size=2)
    _, state = calibrated(mlp, jqobs.QConfig(weight=observer), PARAMS, X)
    assert {name: each.max_val.shape for name, each in state.items()} == {"up/rhs": (6, 2), "down/rhs": (2, 3)}


def test_an_activation_cannot_say_which_axis():
    with pytest.raises(ValueError, match=r"ch_axis must be given in min_max.* for the activation up/lhs"):
        jqobs.observe(mlp, PER_CHANNEL, weight_argnums=0).init(PARAMS, X)
    _, state = calibrated(mlp, jqobs.QConfig(activation=PER_CHANNEL.replace(ch_axis=-1)), PARAMS, X)
    assert state["up/lhs"].min_val.shape == (4,)


def test_patterns():
    histogram = jqobs.log_histogram(bins_per_octave=2)
    observers = {"down/*": None, "*": CONFIG, "down/lhs": histogram, "up/out": histogram}
    _, state = calibrated(mlp, observers, PARAMS, X)
    kinds = {name: type(each).__name__ for name, each in state.items()}
    assert kinds == {
        "up/lhs": "MinMaxState",
        "up/rhs": "MinMaxState",
        "up/out": "LogHistogramState",
        "down/lhs": "LogHistogramState",
    }
    assert int(state["up/out"].seen) == 30


def test_an_operation_is_a_pattern_too():
    _, state = calibrated(mlp, {"down": None, "*": jqobs.min_max()}, PARAMS, X)
    assert set(state) == {"up/lhs", "up/rhs"}


def test_outputs_on_request():
    _, state = calibrated(mlp, jqobs.QConfig(output=jqobs.min_max()), PARAMS, X)
    assert set(state) == {"up/out", "down/out"}
    np.testing.assert_array_equal(state["up/out"].max_val, (X @ PARAMS["up"]["kernel"]).max())


def test_a_pattern_that_matches_nothing_shows_the_nearest():
    with pytest.raises(ValueError, match="'up/lsh' matches no site; the nearest are up/lhs"):
        jqobs.observe(mlp, {"up/lsh": None}, weight_argnums=0).init(PARAMS, X)


@pytest.mark.parametrize("wrong", [jqobs.min_max, 3, jqobs.linen.MinMaxObserver(), nnx.relu])
def test_what_is_no_observer(wrong):
    with pytest.raises(ValueError, match="activation must be"):
        jqobs.QConfig(activation=wrong)
    with pytest.raises(ValueError, match="must be"):
        jqobs.observe(mlp, wrong, weight_argnums=0).init(PARAMS, X)


def test_recipes_stand_for_observers():
    recipes = jqobs.linen.PerChannelMinMaxObserver.with_args(ch_axis=1), jqobs.nnx.MinMaxObserver.with_args()
    config = jqobs.QConfig(weight=recipes[0], activation=recipes[1].with_args(qdtype=jqobs.quint4))
    assert config.weight is PER_CHANNEL.replace(ch_axis=1)
    assert config.activation is jqobs.min_max(qdtype=jqobs.quint4)


def test_weights_that_nobody_named():
    with pytest.warns(UserWarning, match="no operand is a weight; say with weight_argnums="):
        jqobs.observe(mlp, CONFIG).init(PARAMS, X)


# --- Masks


def test_padding_is_left_out():
    def fn(params, x, valid):
        return mlp(params, jnp.where(valid[:, None], x, 1e6))

    def mask(site, params, x, valid):
        assert not site.is_weight
        return valid[:, None] if site.operation == "up" else None

    valid = jnp.array([True, True, False, True, False])
    _, state = calibrated(fn, CONFIG, PARAMS, X, valid, mask=mask)
    assert (int(state["up/lhs"].seen), float(state["up/lhs"].max_val)) == (12, float(X[valid].max()))
    assert int(state["down/lhs"].seen) == 30


def test_a_wrong_mask_names_the_site():
    with pytest.raises(ValueError, match="mask must have the rank of x") as error:
        calibrated(mlp, CONFIG, PARAMS, X, mask=lambda site, params, x: jnp.ones(5, bool))
    assert "at the site up/lhs" in error.value.__notes__


# --- Sharing


def qkv(params, x):
    return [x[i] @ params[name] for i, name in enumerate("qkv")]


QKV = {name: normal(4, 4, seed=i) for i, name in enumerate("qkv")}, jnp.stack([X, 3 * X, -5 * X])


@pytest.mark.parametrize("observer", [jqobs.min_max(), jqobs.log_histogram(bins_per_octave=4)])
def test_a_group_has_one_range(observer):
    calibration, state = calibrated(qkv, observer, *QKV, share=["[qkv]/lhs"])
    qparams = calibration.calculate_qparams(state)
    assert len({tuple(map(float, qparams[f"{name}/lhs"])) for name in "qkv"}) == 1
    assert len({tuple(map(float, qparams[f"{name}/rhs"])) for name in "qkv"}) == 3
    assert float(state["q/lhs"].max_val) != float(state["k/lhs"].max_val)
    whole = observer.init(QKV[1])
    for x in QKV[1]:
        whole = observer.update(whole, x)
    np.testing.assert_array_equal(qparams["q/lhs"].scale, observer.calculate_qparams(whole).scale)


@pytest.mark.parametrize(
    ("share", "observers", "match"),
    [
        (["[qkv]/lhs"], jqobs.moving_average_min_max(), "share: moving_average_min_max.* cannot be merged"),
        (["[qkv]/*"], CONFIG, "one observer; q/lhs has min_max.* and q/rhs has"),
        (["[qk]/lhs", "[kv]/lhs"], CONFIG, "k/lhs is in two"),
        ("z/lhs", CONFIG, "'z/lhs' matches no site"),
        ([("q/lhs", 3)], CONFIG, "a pattern must be a string"),
    ],
)
def test_groups_that_cannot_be(share, observers, match):
    with pytest.raises(ValueError, match=match):
        jqobs.observe(qkv, observers, weight_argnums=0, share=share).init(*QKV)


# --- Reading


def test_one_state_is_read_on_every_grid():
    calibration, state = calibrated(mlp, CONFIG, PARAMS, X)
    narrow = jqobs.QConfig(
        activation=jqobs.min_max(qdtype=jqobs.quint4), weight=PER_CHANNEL.replace(qdtype=jqobs.qint4)
    )
    qparams = calibration.calculate_qparams(state, narrow)
    assert {str(each.qdtype) for each in qparams.values()} == {"quint4", "qint4"}
    assert set(calibration.calculate_qparams(state, {"up/lhs": jqobs.min_max(), "*": None})) == {"up/lhs"}
    hand = narrow.weight.replace(ch_axis=1)
    kernel = PARAMS["up"]["kernel"]
    expected = hand.calculate_qparams(hand.update(hand.init(kernel), kernel))
    np.testing.assert_array_equal(qparams["up/rhs"].scale, expected.scale)


def test_a_plain_dict_does_not_say_what_it_is_of():
    calibration = jqobs.observe(mlp, CONFIG, weight_argnums=0)
    with pytest.raises(ValueError, match=r"state must be a ModelState.*got a dict"):
        calibration.calculate_qparams({})
    with pytest.raises(jqobs.NotCalibratedError, match="none of the observers has seen data"):
        calibration.calculate_qparams(calibration.init(PARAMS, X))


def test_a_branch_that_was_not_taken_is_named():
    def fn(w, x):
        return jax.lax.cond(x.sum() > 0, lambda x: x @ w["a"], lambda x: x @ w["b"], x)

    calibration, state = calibrated(fn, jqobs.min_max(), {"a": normal(4, 4), "b": normal(4, 4)}, abs(X))
    with pytest.warns(UserWarning, match="2 of 4 observers saw no data and are left out: "):
        assert set(calibration.calculate_qparams(state)) == {"a/lhs", "a/rhs"}


def test_the_state_of_two_streams():
    calibration = jqobs.observe(mlp, CONFIG, weight_argnums=0)
    empty = calibration.init(PARAMS, X)
    one, other = (calibration.update(empty, PARAMS, x)[1] for x in (X, -3 * X))
    merged = calibration.merge(one, other)
    whole = calibration.update(one, PARAMS, -3 * X)[1]
    np.testing.assert_array_equal(merged["up/lhs"].min_val, whole["up/lhs"].min_val)
    with pytest.raises(ValueError, match="only one has down/lhs"):
        calibration.merge(one, jqobs.observe(mlp, {"down/lhs": None, "*": CONFIG}, weight_argnums=0).init(PARAMS, X))
    ordered, state = calibrated(mlp, jqobs.QConfig(activation=jqobs.moving_average_min_max()), PARAMS, X)
    with pytest.raises(ValueError, match=r"cannot merge moving_average_min_max.*at up/lhs, down/lhs"):
        ordered.merge(state, state)


def test_stacks_are_merged_and_read():
    def fn(params, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])[0]

    for observer in (jqobs.log_histogram(bins_per_octave=2), jqobs.histogram(bins=8)):
        config = jqobs.QConfig(activation=observer, weight=PER_CHANNEL)
        args = {"layers": normal(3, 4, 4)}, X
        calibration, state = calibrated(fn, config, *args)
        merged = calibration.merge(state, state)
        assert np.asarray(merged["layers/lhs"].seen).tolist() == [40, 40, 40]
        qparams = calibration.calculate_qparams(merged)
        assert (qparams["layers/lhs"].scale.shape, qparams["layers/rhs"].scale.shape) == ((3,), (3, 4))


def test_a_state_of_another_function():
    calibration, state = calibrated(mlp, CONFIG, PARAMS, X)
    few = jqobs.observe(mlp, {"up/lhs": jqobs.min_max(), "*": None}, weight_argnums=0).init(PARAMS, X)
    with pytest.raises(ValueError, match="lacks down/lhs, down/rhs, up/rhs; begin with init"):
        calibration.update(few, PARAMS, X)
    with pytest.raises(ValueError, match="same sites; only one has upp/lhs"):
        state.replace({**state, "upp/lhs": state["up/lhs"]})


def test_calibrate(traces):
    fn = traces(mlp)
    calibration = jqobs.observe(fn, CONFIG, weight_argnums=0)
    state = jqobs.calibrate(calibration, [(PARAMS, X * i) for i in range(1, 5)])
    assert (int(state["up/lhs"].seen), fn.count) == (80, 2)  # Once for init, once for the loop.
    _, once = calibration.update(calibration.init(PARAMS, X), PARAMS, 4 * X)
    np.testing.assert_array_equal(state["up/lhs"].max_val, once["up/lhs"].max_val)


# --- Simulation


def test_simulate_is_fake_quantize_at_the_sites():
    calibration, state = calibrated(mlp, CONFIG, PARAMS, X)
    qparams = calibration.calculate_qparams(state)

    def by_hand(params, x):
        h = jnp.tanh(
            jqobs.fake_quantize(x, qparams["up/lhs"]) @ jqobs.fake_quantize(params["up"]["kernel"], qparams["up/rhs"])
        )
        return jqobs.fake_quantize(h, qparams["down/lhs"]) @ jqobs.fake_quantize(
            params["down"]["kernel"], qparams["down/rhs"]
        )

    quantized = jqobs.simulate(mlp, qparams)
    np.testing.assert_allclose(quantized(PARAMS, X), jax.jit(by_hand)(PARAMS, X), rtol=1e-6)
    assert not np.array_equal(quantized(PARAMS, X), mlp(PARAMS, X))
    gradient = jax.grad(lambda params: quantized(params, X).sum())(PARAMS)
    expected = jax.grad(lambda params: by_hand(params, X).sum())(PARAMS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), gradient, expected)
    xs = jnp.stack([X, 2 * X])
    np.testing.assert_allclose(jax.vmap(quantized, (None, 0))(PARAMS, xs)[1], quantized(PARAMS, 2 * X), rtol=1e-5)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_simulate_on_sharded_arrays(kind):
    calibration, state = calibrated(mlp, CONFIG, PARAMS, X)
    quantized = jqobs.simulate(mlp, calibration.calculate_qparams(state))
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType[kind],))
    x = normal(16, 4)
    with jax.set_mesh(mesh):
        spread = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.P("d")))
        params = jax.device_put(PARAMS, jax.sharding.NamedSharding(mesh, jax.P()))
        out, gradient = jax.jit(jax.value_and_grad(lambda params, x: quantized(params, x).sum()))(params, spread)
    expected = jax.value_and_grad(lambda params, x: quantized(params, x).sum())(PARAMS, x)
    np.testing.assert_allclose(out, expected[0], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), gradient, expected[1])


def test_a_site_without_a_grid_stays_in_float():
    calibration, state = calibrated(mlp, CONFIG, PARAMS, X)
    assert np.array_equal(jqobs.simulate(mlp, {})(PARAMS, X), jax.jit(mlp)(PARAMS, X))
    qparams = calibration.calculate_qparams(state)
    with pytest.raises(ValueError, match=r"these are none: upp/lhs\. the nearest are up/lhs"):
        jqobs.simulate(mlp, {**qparams, "upp/lhs": qparams["up/lhs"]})(PARAMS, X)


def recurrences(params, xs):
    """A stack of three layers, each of them a recurrence over the time: loops of equal length."""

    def layer(xs, w):
        return jax.lax.scan(lambda h, x: ((h := jnp.tanh(h @ w + x)), h), jnp.zeros(4), xs)[1], None

    return jax.lax.scan(layer, xs, params["layers"])[0]


@pytest.mark.parametrize("length", [2, 3])
def test_simulate_a_stack_of_recurrences(length):
    args = {"layers": normal(3, 4, 4)}, X[:length]
    calibration, state = calibrated(recurrences, CONFIG, *args)
    qparams = calibration.calculate_qparams(state)
    assert qparams["layers/rhs"].scale.shape == (3, 4)

    def by_hand(params, xs):
        for i, w in enumerate(params["layers"]):
            grids = [jax.tree.map(lambda leaf, i=i: leaf[i], qparams[f"layers/{side}"]) for side in ("lhs", "rhs")]
            h, out = jnp.zeros(4), []
            for x in xs:
                h = jnp.tanh(jqobs.fake_quantize(h, grids[0]) @ jqobs.fake_quantize(w, grids[1]) + x)
                out.append(h)
            xs = jnp.stack(out)
        return xs

    if length == 3:  # Which of the two loops is the stack cannot be seen from the grid.
        with pytest.raises(ValueError, match="say with weight_argnums= which arguments hold weights"):
            jqobs.simulate(recurrences, qparams)(*args)
    quantized = jqobs.simulate(recurrences, qparams, weight_argnums=0)
    np.testing.assert_allclose(quantized(*args), by_hand(*args), rtol=1e-5)


def test_a_grid_for_other_layers():
    calibration, state = calibrated(recurrences, CONFIG, {"layers": normal(3, 4, 4)}, X)
    with pytest.raises(ValueError, match=r"the axes \(3,\) in front must be those of the stacks"):
        jqobs.simulate(recurrences, calibration.calculate_qparams(state))({"layers": normal(2, 4, 4)}, X)


@jax.custom_vjp
def scaled(w, x):
    return x @ w


scaled.defvjp(lambda w, x: (x @ w, (w, x)), lambda saved, g: (7 * saved[1].T @ g, g @ saved[0].T))


def test_rules_are_kept_by_observe_and_inlined_by_simulate():
    w = normal(4, 4)
    calibration, state = calibrated(scaled, jqobs.min_max(), w, X)
    by_rule = jax.grad(lambda w: calibration.update(state, w, X)[0].sum())(w)
    np.testing.assert_allclose(by_rule, jax.grad(lambda w: scaled(w, X).sum())(w))
    quantized = jqobs.simulate(scaled, calibration.calculate_qparams(state))
    with pytest.warns(UserWarning, match="were inlined.*around w/lhs, w/rhs"):
        gradient = jax.grad(lambda w: quantized(w, X).sum())(w)
    assert np.abs(gradient).max() < np.abs(by_rule).max() / 5
    untouched = jax.grad(lambda w: jqobs.simulate(scaled, {})(w, X).sum())(w)
    np.testing.assert_allclose(untouched, by_rule)


@jax.custom_vjp
def called_back(w, x):
    return jnp.tanh(jax.pure_callback(lambda x: x, x, x) @ w)


called_back.defvjp(lambda w, x: (called_back(w, x), (w, x)), lambda saved, g: (saved[1].T @ g, g @ saved[0].T))


def test_a_rule_stands_in_for_what_cannot_be_differentiated():
    """A callback has no derivative, and what is only looked at must not ask for one."""
    w = normal(4, 4)
    calibration = jqobs.observe(called_back, jqobs.min_max(), weight_argnums=0)
    state = calibration.init(w, X)
    by_rule = jax.grad(lambda x: calibration.update(state, w, x)[0].sum())(X)
    np.testing.assert_allclose(by_rule, jax.grad(lambda x: called_back(w, x).sum())(X))


def test_what_is_computed_again_is_not_kept_instead():
    """The barrier that keeps the compiler from merging both computations stays under observation."""
    fn = jax.grad(lambda w, x: jax.checkpoint(lambda x: jnp.tanh(x @ w))(x).sum())
    calibration = jqobs.observe(fn, jqobs.min_max(), weight_argnums=0)
    args = normal(4, 4), X
    state = calibration.init(*args)
    for program in (jax.jit(fn).lower(*args), jax.jit(calibration.update).lower(state, *args)):
        assert "optimization_barrier" in program.as_text()


def test_training_on_the_grid():
    calibration, state = calibrated(mlp, CONFIG, PARAMS, X)
    narrow = jqobs.QConfig(jqobs.min_max(qdtype=jqobs.quint4), PER_CHANNEL.replace(qdtype=jqobs.qint4))
    quantized = jqobs.simulate(mlp, calibration.calculate_qparams(state, narrow))
    target, optimizer = mlp(PARAMS, X), optax.sgd(0.05)

    @jax.jit
    def step(params, moments):
        loss, gradient = jax.value_and_grad(lambda params: ((quantized(params, X) - target) ** 2).mean())(params)
        updates, moments = optimizer.update(gradient, moments)
        return optax.apply_updates(params, updates), moments, loss

    params, moments, losses = PARAMS, optimizer.init(PARAMS), []
    for _ in range(60):
        params, moments, loss = step(params, moments)
        losses.append(float(loss))
    assert min(losses[-20:]) < losses[0] / 2


def test_sensitivity(traces):
    fn = traces(mlp)
    calibration = jqobs.observe(mlp, CONFIG, weight_argnums=0)
    state = jqobs.calibrate(calibration, [(PARAMS, X), (PARAMS, -X)])
    grids = {"up/lhs": jqobs.quint2, "up/rhs": jqobs.qint8, "down/lhs": jqobs.quint8, "down/rhs": jqobs.qint8}
    qparams = {}
    for name, qdtype in grids.items():
        observer = (PER_CHANNEL if name.endswith("rhs") else jqobs.min_max()).replace(qdtype=qdtype)
        qparams |= calibration.calculate_qparams(state, {name: observer, "*": None})
    error = lambda out, reference: jnp.abs(out - reference).mean()  # noqa: E731
    costs = jqobs.sensitivity(fn, qparams, [(PARAMS, X), (PARAMS, -X)], error, weight_argnums=0)
    assert list(costs) == list(grids)
    assert max(costs, key=costs.get) == "up/lhs"
    assert fn.count == 1  # For float and for all sites.
    for name, cost in costs.items():
        alone = jqobs.simulate(mlp, {name: qparams[name]})
        expected = np.mean([float(error(alone(PARAMS, x), mlp(PARAMS, x))) for x in (X, -X)])
        np.testing.assert_allclose(cost, expected, rtol=1e-3)
    with pytest.raises(ValueError, match="batches must hold at least one batch"):
        jqobs.sensitivity(fn, qparams, iter(()), error)


# --- Models that were not written for it


class Mixer(nnx.Module):
    """An MLP-Mixer of one block."""

    def __init__(self, patches, features, rngs):
        self.stem = nnx.Conv(3, features, (4, 4), strides=4, rngs=rngs)
        self.tokens = nnx.Sequential(nnx.Linear(patches, 8, rngs=rngs), nnx.gelu, nnx.Linear(8, patches, rngs=rngs))
        self.norm = nnx.LayerNorm(features, rngs=rngs)
        self.head = nnx.Linear(features, 10, rngs=rngs)

    def __call__(self, x):
        x = self.stem(x).reshape(x.shape[0], -1, self.norm.num_features)
        x = x + self.tokens(self.norm(x).swapaxes(1, 2)).swapaxes(1, 2)
        return self.head(x.mean(1))


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.Conv(8, (3, 3), use_bias=False, name="stem")(x)
        for i in range(2):
            y = nn.relu(nn.BatchNorm(use_running_average=not train, name=f"norm_{i}")(x))
            x = x + nn.Conv(8, (3, 3), feature_group_count=2, name=f"conv_{i}")(y)
        return nn.Dense(10)(x.mean((1, 2)))


def gpt(params, tokens):
    """A block of plain JAX, with its layers in a scan."""

    def block(x, layer):
        q, k, v = jnp.split(x @ layer["attention"]["qkv"], 3, -1)
        scores = jnp.einsum("btc,bsc->bts", q, k) / q.shape[-1] ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
        x = x + jnp.einsum("bts,bsc->btc", jax.nn.softmax(scores), v) @ layer["attention"]["out"]
        return x + jax.nn.gelu(x @ layer["mlp"]["up"]) @ layer["mlp"]["down"], None

    x, _ = jax.lax.scan(jax.checkpoint(block), params["embed"][tokens], params["layers"])
    return x @ params["embed"].T


def mixer():
    model = Mixer(4, 6, nnx.Rngs(0))
    return (
        lambda model, x: model(x),
        (model, normal(2, 8, 8, 3)),
        ["stem", "tokens/layers/0", "tokens/layers/2", "head"],
    )


def resnet():
    model, x = ResNet(), normal(2, 8, 8, 3)
    return model.apply, (model.init(jax.random.key(0), x), x), ["stem", "conv_0", "conv_1", "Dense_0"]


def transformer():
    shapes = {"attention": {"qkv": (2, 8, 24), "out": (2, 8, 8)}, "mlp": {"up": (2, 8, 16), "down": (2, 16, 8)}}
    layers = {part: {name: normal(*shape) / 4 for name, shape in each.items()} for part, each in shapes.items()}
    names = [f"layers/{name}" for name in ["attention/qkv", "attention/btc,bsc->bts", "attention/bts,bsc->btc"]]
    names += [f"layers/{name}" for name in ["attention/out", "mlp/up", "mlp/down"]]
    return gpt, ({"embed": normal(16, 8), "layers": layers}, jnp.arange(12).reshape(2, 6) % 16), [*names, "embed"]


@pytest.mark.parametrize("model", [mixer, resnet, transformer])
def test_models_that_were_not_written_for_it(model):
    fn, args, names = model()
    calibration = jqobs.observe(fn, CONFIG, weight_argnums=0)
    assert list(dict.fromkeys(site.operation for site in calibration.sites(*args))) == names
    out, state = calibration.update(calibration.init(*args), *args)
    np.testing.assert_array_equal(out, jax.jit(lambda *args: fn(*args))(*args))
    qparams = calibration.calculate_qparams(state)
    assert len(qparams) == 2 * len(names)
    quantized = jqobs.simulate(fn, qparams)(*args)
    assert 0 < np.abs(quantized - out).max() < 0.1 * np.abs(out).max()


# --- What an audit found


def scoped(name, inside):
    """The function under a scope."""

    def function(*args):
        with jax.named_scope(name):
            return inside(*args)

    return function


def names_of(fn, *args):
    sites = jqobs.observe(fn, jqobs.min_max(), weight_argnums=0).sites(*args)
    return list(dict.fromkeys(site.operation for site in sites))


def test_capital_scopes_of_the_user_stay():
    fn = scoped("Model", scoped("Attention", lambda p, x: x @ p["q"]["kernel"]))
    assert names_of(fn, {"q": {"kernel": normal(4, 4)}}, X) == ["Model/Attention/q"]

    class Up(nn.Module):
        @nn.compact
        def __call__(self, x):
            with jax.named_scope("Encoder"):
                return nn.Dense(4)(x)

    variables = Up().init(jax.random.key(0), X)
    assert names_of(scoped("GPT", Up().apply), variables, X) == ["GPT/Encoder/Dense_0"]
    assert names_of(lambda v, x: Up().apply(v, x), variables, X) == ["Encoder/Dense_0"]


@pytest.mark.parametrize(
    ("fn", "args", "names"),
    [
        (
            lambda p, b: [b["inputs"]["image"] @ p[k] for k in "qk"],
            ({"q": 1, "k": 1}, {"inputs": {"image": 0}}),
            ["q", "k"],
        ),
        (lambda p, x: x @ (p["q"]["int"] * p["q"]["scale"]), ({"q": {"int": 1, "scale": 1}}, 0), ["q"]),
        (lambda p, x: x @ jnp.where(x.T > 0, 0.0, 2 * p["q"]), ({"q": 1}, 0), ["x"]),
        (lambda p, x: x @ (2 * jnp.tanh(p["q"])), ({"q": 1}, 0), ["q"]),
        (lambda p, x: x @ jnp.concatenate([p["a"]["q"], p["a"]["k"]]), ({"a": {"q": 1, "k": 1}}, 2), ["a"]),
    ],
)
def test_computed_weights_keep_their_names(fn, args, names):
    shapes = [normal(4, 4), normal(4, 4, seed=1), normal(4, 8)]
    args = jax.tree.map(lambda which: shapes[which], args)
    assert names_of(fn, *args) == names


def test_effects_happen_once():
    seen = []

    def loud(w, x):
        def step(x, _):
            return jax.experimental.io_callback(lambda x: seen.append(1) or x, x, x) @ w, None

        return jax.lax.scan(step, x, None, length=3)[0]

    @jax.custom_vjp
    def printing(w, x):
        loud = lambda x: (jax.debug.callback(lambda: seen.append(1)), x + 1)[1]  # noqa: E731
        return jax.lax.switch(2, [jnp.sin, jnp.cos, jax.jit(loud)], x) @ w

    printing.defvjp(lambda w, x: (printing(w, x), (w, x)), lambda saved, g: (saved[1].T @ g, g @ saved[0].T))
    for fn, times in ((loud, 3), (printing, 1)):
        calibration = jqobs.observe(fn, jqobs.min_max(), weight_argnums=0)
        seen.clear()
        jax.block_until_ready(calibration.update(calibration.init(normal(4, 4), X), normal(4, 4), X))
        jax.effects_barrier()
        assert len(seen) == times


def test_variants_of_a_function_share_a_calibration():
    fn = lambda p, x, both: (x @ p["a"], 3 * x @ p["b"]) if both else x @ p["a"]  # noqa: E731
    params = {"a": normal(4, 4), "b": normal(4, 4)}
    calibration = jqobs.observe(fn, {"b/lhs": None, "*": jqobs.min_max()}, weight_argnums=0, share=["[ab]/rhs"])
    _, state = calibration.update(calibration.init(params, X, True), params, X, True)
    before = calibration.calculate_qparams(state)
    _, state = calibration.update(state, params, X, False)
    after = calibration.calculate_qparams(state)
    assert set(after) == set(before) == {"a/lhs", "a/rhs", "b/rhs"}
    assert float(after["a/rhs"].scale) == float(after["b/rhs"].scale) == float(before["b/rhs"].scale)


def test_flags_everywhere():
    fn = lambda w, x, kind, twice: x @ w * (2.0 if twice else 1.0) if kind == "mlp" else x  # noqa: E731
    calibration = jqobs.observe(fn, jqobs.min_max(qdtype=jqobs.quint4), weight_argnums=0)
    batches = [(normal(4, 4), X, "mlp", True)]
    qparams = calibration.calculate_qparams(jqobs.calibrate(calibration, batches))
    cost = jqobs.sensitivity(fn, qparams, batches, lambda out, reference: jnp.abs(out - reference).max())
    assert min(cost.values()) > 0


def test_the_cost_of_sites_that_only_a_variant_has():
    """A batch of another form is another program: its sites have other places in the list."""
    fn = lambda p, x, both: (x @ p["a"] + 3 * x @ p["b"]) if both else 3 * x @ p["b"]  # noqa: E731
    params = {"a": normal(4, 4), "b": normal(4, 4)}
    calibration, state = calibrated(fn, jqobs.min_max(qdtype=jqobs.quint2), params, X, True)
    qparams = {"*": calibration.calculate_qparams(state)["b/rhs"]}
    error = lambda out, reference: jnp.abs(out - reference).mean()  # noqa: E731
    costs = jqobs.sensitivity(fn, qparams, [(params, X, True), (params, X, False)], error)
    for name, cost in costs.items():
        alone = jqobs.simulate(fn, {name: qparams["*"]})
        flags = [True, False] if name.startswith("b") else [True]
        expected = sum(float(error(alone(params, X, flag), fn(params, X, flag))) for flag in flags) / 2
        np.testing.assert_allclose(cost, expected, rtol=1e-3)
    assert set(costs) == {"a/lhs", "a/rhs", "b/lhs", "b/rhs"}


def test_references_inside_a_loop():
    def fn(w, x):
        total = jax.new_ref(jnp.zeros_like(x))

        def body(x, w):
            total[...] += x
            return jnp.tanh(x @ w), None

        return jax.lax.scan(body, x, w)[0] + total[...]

    args = normal(3, 4, 4), X
    calibration = jqobs.observe(fn, jqobs.min_max(), weight_argnums=0)
    out, _ = calibration.update(calibration.init(*args), *args)
    np.testing.assert_allclose(out, jax.jit(fn)(*args), rtol=1e-5)


def test_update_inside_a_checking_shard_map():
    fn = lambda w, x: jax.lax.cond(  # noqa: E731
        x.sum() > 0, lambda x: jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=2)[0], lambda x: x, x
    )
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    calibration = jqobs.observe(fn, jqobs.min_max(), weight_argnums=0)
    w, x = normal(4, 4), abs(normal(8, 4))
    state = calibration.init(w, x)

    def on_each(w, x):
        return jqobs.merge_across(calibration, calibration.update(state, w, x)[1], "d")

    merged = jax.jit(jax.shard_map(on_each, mesh=mesh, in_specs=(jax.P(), jax.P("d")), out_specs=jax.P()))(w, x)
    _, expected = calibration.update(state, w, x)
    np.testing.assert_allclose(merged["w/lhs"].max_val, expected["w/lhs"].max_val, rtol=1e-6)


def test_odd_things_in_a_closure():
    class Proxy:
        def __getattr__(self, name):
            raise RuntimeError(name)

    def wrapped(x):
        return x

    wrapped.__wrapped__ = wrapped
    proxy, many = Proxy(), dict.fromkeys(range(100_000))
    fn = lambda w, x: (wrapped(x) @ w, proxy, many)[0]  # noqa: E731
    assert names_of(fn, normal(4, 4), X) == ["w"]


def test_params_by_keyword():
    calibration = jqobs.observe(mlp, CONFIG, weight_argnums=0)
    _, state = calibration.update(calibration.init(params=PARAMS, x=X), params=PARAMS, x=X)
    assert state["up/rhs"].min_val.shape == (6,)
    assert jqobs.observe(mlp, CONFIG, weight_argnums=range(1)).sites(PARAMS, X)[1].is_weight


def test_groups_on_an_explicit_mesh():
    mesh = jax.make_mesh((2, 4), ("d", "m"))
    w = normal(4, 8)
    observer = PER_CHANNEL.replace(ch_axis=1, group_size=2)
    qparams = observer.calculate_qparams(observer.update(observer.init(w), w))
    with jax.set_mesh(mesh):
        sharded = jax.device_put(w, jax.sharding.NamedSharding(mesh, jax.P(None, "m")))
        out = jax.jit(jqobs.fake_quantize)(sharded, qparams)
    np.testing.assert_array_equal(jax.device_get(out), jqobs.fake_quantize(w, qparams))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: jqobs.simulate(mlp, 5), "qparams must be a dict of QParams"),
        (lambda: jqobs.simulate(mlp, {"up/lhs": 3.0}), "qparams must be a dict of QParams"),
        (lambda: jqobs.simulate(None, {}), "fn must be a function"),
        (lambda: jqobs.observe(None, CONFIG), "fn must be a function"),
        (lambda: jqobs.observe(mlp, CONFIG, share=5), "share must be a pattern"),
        (lambda: jqobs.observe(mlp, CONFIG, mask=5), "mask must be a function"),
        (
            lambda: jqobs.observe(mlp, CONFIG, weight_argnums=0).update(None, PARAMS, X),
            "state must be a ModelState",
        ),
        (lambda: jqobs.sensitivity(mlp, {}, [], None), "metric must be a function"),
        (
            lambda: (
                jqobs.observe(qkv, jqobs.min_max(), weight_argnums=0, share="?/lhs").init(
                    QKV[0], [X, X.T[:, :4], X[:1]]
                )
                and jqobs.observe(qkv, PER_CHANNEL.replace(ch_axis=0), weight_argnums=0, share="[qk]/lhs").init(
                    QKV[0], [X, X[:2], X]
                )
            ),
            "states of one shape; that of q/lhs is for",
        ),
    ],
)
def test_errors_name_the_argument(call, match):
    with pytest.raises(ValueError, match=match):
        call()
