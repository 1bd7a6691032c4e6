"""Training unedited Flax models with the grid in place, in Linen and in NNX."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from sklearn.datasets import load_digits

import jqobs

W4A4 = jqobs.QConfig(
    activation=jqobs.moving_average_min_max(qdtype=jqobs.quint4),
    weight=jqobs.moving_average_min_max(
        averaging_constant=1.0, qscheme=jqobs.per_channel_symmetric, qdtype=jqobs.qint4
    ),
)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape), jnp.float32)


class Everything(nn.Module):
    """Every layer that is put on the grid, attention included."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (3,), name="conv")(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2, name="attention")(x)
        x = nn.DenseGeneral((2, 4), name="general")(x)
        x = nn.Einsum((6, 8), "btc,dc->btd", name="einsum")(x.reshape(*x.shape[:2], 8))
        x = nn.ConvTranspose(4, (2,), strides=(2,), name="transposed")(x)
        return nn.Dense(3, name="dense")(nn.LayerNorm()(x))


def test_paths_of_parameters_stay():
    model, x = Everything(), normal(2, 4, 4)
    qat = jqobs.linen.prepare_qat(model, W4A4)
    plain, variables = model.init(jax.random.key(0), x), qat.init(jax.random.key(0), x)
    jax.tree.map(np.testing.assert_array_equal, variables["params"], plain["params"])
    layers = {path.rsplit("/", 1)[0] for path in jqobs.linen.calculate_qparams(qat, apply(qat, variables, x)[1], x)}
    attention = {f"attention/{name}" for name in ("query", "key", "value", "out")}
    assert layers == {"conv", "general", "einsum", "transposed", "dense"} | attention
    np.testing.assert_array_equal(qat.apply(plain, x), model.apply(plain, x))  # A float checkpoint, nothing seen.


def apply(model, variables, x):
    y, updated = model.apply(variables, x, mutable=["observers"])
    return y, {**variables, **updated}


def test_the_axis_of_the_output_features():
    model, x = Everything(), normal(2, 4, 4)
    qat = jqobs.linen.prepare_qat(model, W4A4)
    _, variables = apply(qat, qat.init(jax.random.key(0), x), x)
    params = variables["params"]
    qparams = jqobs.linen.calculate_qparams(qat, variables, x)
    for path, axis in {"conv": 2, "einsum": 0, "transposed": 2, "dense": 1, "general": 2, "attention/query": 2}.items():
        kernel = params
        for name in path.split("/"):
            kernel = kernel[name]
        ends = np.abs(kernel["kernel"]).max(tuple(i for i in range(kernel["kernel"].ndim) if i != axis))
        np.testing.assert_allclose(qparams[f"{path}/weight"].scale, ends / 7.5, rtol=1e-6)


def test_it_is_fake_quantize_of_both_operands():
    model, x = nn.Dense(3), normal(5, 4)
    qat = jqobs.linen.prepare_qat(model, W4A4)
    y, variables = apply(qat, qat.init(jax.random.key(0), x), x)
    qparams = jqobs.linen.calculate_qparams(qat, variables, x)
    kernel, bias = variables["params"]["kernel"], variables["params"]["bias"]
    expected = (
        jqobs.fake_quantize(x, qparams["activation"]) @ jqobs.fake_quantize(kernel, qparams["weight"]) + bias[None]
    )
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_the_mapping_decides():
    model, x = Everything(), normal(2, 4, 4)
    mapping = (
        jqobs.QConfigMapping()
        .set_global(W4A4)
        .set_object_type(nn.Conv, None)
        .set_object_type(nn.DenseGeneral, jqobs.QConfig(activation=jqobs.min_max()))
        .set_module_name("attention", None)
        .set_module_name("attention/out", W4A4)
        .set_module_name("dense", jqobs.QConfig(weight=jqobs.min_max()))
    )
    observers = jqobs.linen.prepare_qat(model, mapping).init(jax.random.key(0), x)["observers"]
    found = {name: sorted(entry) for name, entry in observers.items()}
    both = ["activation", "weight"]
    assert found == {
        "general": ["activation"],
        "attention": ["out"],
        "einsum": both,
        "transposed": both,
        "dense": ["weight"],
    }


@pytest.mark.parametrize("space", [jqobs.linen, jqobs.nnx])
def test_what_is_no_mapping(space):
    with pytest.raises(ValueError, match="mapping must be a QConfigMapping or a QConfig; got min_max"):
        space.prepare_qat(nn.Dense(3), jqobs.min_max())


def test_the_longest_name_and_the_latest_word_count():
    one, other = jqobs.QConfig(weight=jqobs.min_max()), jqobs.QConfig()
    mapping = jqobs.QConfigMapping().set_module_name("a/b", one).set_module_name("a", None)
    assert mapping.find("a/b/c", nn.Dense) is one
    assert mapping.find("a/d", nn.Dense) is None
    assert mapping.set_module_name("a/b", other).find("a/b", nn.Dense) is other
    typed = mapping.set_object_type(nn.Module, one).set_object_type(nn.Dense, other)
    assert (typed.find("x", nn.Dense), typed.find("x", nn.Conv), typed.find("a", nn.Dense)) == (other, one, None)


def test_mappings_feed_observe_too():
    fn = lambda params, x: jax.lax.conv(x, params["stem"], (1, 1), "SAME").sum((2, 3)) @ params["mlp"]["up"]  # noqa: E731
    args = {"stem": normal(4, 2, 3, 3), "mlp": {"up": normal(4, 3)}}, normal(1, 2, 5, 5)
    mapping = jqobs.get_default_qconfig_mapping().set_object_type("conv_general_dilated", None)
    assert set(jqobs.observe(fn, mapping, weight_argnums=0).init(*args)) == {"mlp/up/lhs", "mlp/up/rhs"}
    named = mapping.set_module_name("mlp", None).set_module_name("stem", W4A4)
    assert set(jqobs.observe(fn, named, weight_argnums=0).init(*args)) == {"stem/lhs", "stem/rhs"}
    with pytest.raises(ValueError, match=r"set_object_type\(Dense, ...\) is for prepare_qat"):
        jqobs.observe(fn, mapping.set_object_type(nn.Dense, None), weight_argnums=0).init(*args)
    with pytest.raises(ValueError, match="the pattern 'mpl' matches no site"):
        jqobs.observe(fn, mapping.set_module_name("mpl", None), weight_argnums=0).init(*args)
    for wrong in (lambda m: m.set_global(jqobs.min_max()), lambda m: m.set_object_type(3, None)):
        with pytest.raises(ValueError, match="must be a"):
            wrong(mapping)


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(4, 8, (3,), rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.einsum = nnx.Einsum("btc,dc->btd", (6, 8), (6,), rngs=rngs)
        self.dense = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        return self.dense(self.einsum(self.attention(self.conv(x))))


def test_nnx():
    model, x = Attention(nnx.Rngs(0)), normal(2, 4, 4)
    qat = jqobs.nnx.prepare_qat(model, jqobs.QConfigMapping().set_global(W4A4).set_module_name("attention/out", None))
    parameters = [path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    assert [path for path, _ in nnx.to_flat_state(nnx.state(qat, nnx.Param))] == parameters
    before = model(x)
    y = nnx.jit(lambda model, x: model(x))(qat, x)
    qparams = jqobs.nnx.calculate_qparams(qat)
    layers = {path.split("/promote_dtype/")[0] for path in qparams}
    assert layers == {"conv", "einsum", "dense", *(f"attention/{name}" for name in ("query", "key", "value"))}
    assert qparams["einsum/promote_dtype/weight"].scale.shape == (6,)
    assert np.abs(y - before).max() > 0
    np.testing.assert_array_equal(model(x), before)  # The model itself is as it was.
    nnx.update(qat, nnx.state(model, nnx.Param))


def test_nnx_stacks():
    @nnx.vmap(in_axes=0, out_axes=0)
    def stack(key):
        return nnx.Linear(4, 4, rngs=nnx.Rngs(key))

    qat, x = jqobs.nnx.prepare_qat(stack(jax.random.split(jax.random.key(0), 3)), W4A4), normal(2, 4)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def run(layer, x):
        return nnx.tanh(layer(x))

    y = run(qat, x)
    held = qat.promote_dtype
    assert held.weight.cached_qparams.get_value().scale.shape == (3, 4)
    assert np.asarray(held.activation.state.get_value().seen).tolist() == [8, 8, 8]
    kernel = qat.kernel.get_value()
    np.testing.assert_allclose(held.weight.cached_qparams.get_value().scale, np.abs(kernel).max(1) / 7.5, rtol=1e-6)
    assert np.isfinite(y).all()


class Coder(nn.Module):
    def setup(self):
        self.encoder, self.decoder = Activated(4), nn.Dense(4)

    def __call__(self, x):
        return self.decoder(self.encoder(x))

    def encode(self, x):
        return self.encoder(x)


class Activated(nn.Dense):
    activation: object = nn.relu

    @nn.compact
    def __call__(self, x):
        return self.activation(super().__call__(x))


def test_a_prepared_model_is_used_like_the_model():
    import pickle

    qat, x = jqobs.linen.prepare_qat(Coder(), W4A4), normal(2, 4)
    _, variables = apply(qat, qat.init(jax.random.key(0), x), x)
    y = qat.apply(variables, x)
    np.testing.assert_array_equal(qat.bind(variables)(x), y)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(qat)).apply(variables, x), y)
    for method in ("encode", qat.encode, Coder.encode):
        np.testing.assert_array_equal(qat.apply(variables, x, method=method), qat.bind(variables).encode(x))
    assert qat.apply is qat.apply
    with_new_qparams = jqobs.linen.read_qparams(qat, variables, x, method="encode")
    jax.tree.map(np.testing.assert_array_equal, with_new_qparams, variables)
    assert set(variables["observers"]["encoder"]) == {"activation_grid", "weight"}
    for space, prepared in ((jqobs.linen, qat), (jqobs.nnx, jqobs.nnx.prepare_qat(Attention(nnx.Rngs(0)), W4A4))):
        with pytest.raises(ValueError, match="not on the grid yet"):
            space.prepare_qat(prepared, W4A4)


# --- Training


def digits():
    data = load_digits()
    x, y = (data.images[..., None] / 16).astype(np.float32), data.target
    return (x[:1024], y[:1024]), (x[1024:], y[1024:])


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(8, (3, 3), strides=2)(x))
        return nn.Dense(10)(x.reshape(x.shape[0], -1))


def train(model, variables, data, steps, traces=None, shard=lambda x: x, change=lambda step, variables: variables):
    """Steps of 64 images; returns the variables and the losses."""
    optimizer, (x, y) = optax.chain(optax.trace(0.9), optax.scale(-0.02)), data
    moments = optimizer.init(variables["params"])

    def step(variables, moments, x, y):
        def loss(params):
            logits, updated = model.apply({**variables, "params": params}, x, mutable=["observers"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), updated

        (value, updated), gradient = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        updates, moments = optimizer.update(gradient, moments)
        params = optax.apply_updates(variables["params"], updates)
        return {**variables, **updated, "params": params}, moments, value

    step = jax.jit(traces(step) if traces else step)
    losses = []
    for i in range(steps):
        batch = slice(64 * i % len(x), 64 * i % len(x) + 64)
        variables, moments, loss = step(change(i, variables), moments, shard(x[batch]), shard(y[batch]))
        losses.append(float(loss))
    return variables, losses, step


def accuracy(fn, variables, data):
    return float((jax.jit(fn)(variables, data[0]).argmax(-1) == data[1]).mean())


def test_qat_beats_calibration_after_training(traces):
    """Two epochs at W4A4, on three seeds; and the loss falls."""
    training, test = digits()
    model, qat = Classifier(), jqobs.linen.prepare_qat(Classifier(), W4A4)
    for seed in range(3):
        variables, _, _ = train(model, model.init(jax.random.key(seed), training[0][:1]), training, 64)
        floats = {"params": variables["params"]}
        calibration = jqobs.observe(model.apply, W4A4, weight_argnums=0)
        state = jqobs.calibrate(calibration, [(floats, training[0][:256])])
        after = accuracy(jqobs.simulate(model.apply, calibration.calculate_qparams(state)), floats, test)
        start = {**qat.init(jax.random.key(seed), training[0][:1]), **floats}
        trained, losses, step = train(qat, start, training, 32, traces)
        assert np.mean(losses[16:]) < np.mean(losses[:16])  # The second epoch against the first, on the same images.
        assert accuracy(qat.apply, trained, test) > after
        assert step.__wrapped__.count == 1


def test_one_compilation_with_switches_thrown(traces):
    training, _ = digits()
    qat = jqobs.linen.prepare_qat(Classifier(), W4A4)
    change = {2: jqobs.linen.disable_observer, 4: jqobs.linen.disable_fake_quant, 6: jqobs.linen.enable_fake_quant}
    start = qat.init(jax.random.key(0), training[0][:1])
    variables, _, step = train(qat, start, training, 8, traces, change=lambda i, v: change.get(i, lambda v: v)(v))
    assert step.__wrapped__.count == 1
    assert int(variables["observers"]["Conv_0"]["activation"]["state"].seen) == 2 * 64 * 64


def test_on_many_devices_the_same():
    training, _ = digits()
    qat = jqobs.linen.prepare_qat(Classifier(), W4A4)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    shard = lambda x: jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.P("data")))  # noqa: E731
    start = qat.init(jax.random.key(0), training[0][:1])
    one, _, _ = train(qat, start, training, 3)
    many, _, _ = train(qat, start, training, 3, shard=shard)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(jax.device_get(many)), strict=True):
        np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=1e-5, atol=1e-5)


class Scanned(nn.Module):
    loop: bool

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block) if self.loop else Block
        if self.loop:
            axes = {"params": 0, "observers": 0}
            scan = nn.scan(block, variable_axes=axes, split_rngs={"params": True}, length=2)
            return scan(name="blocks")(x, None)[0]
        for i in range(2):
            x, _ = block(name=f"block_{i}")(x, None)
        return x


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.tanh(nn.Dense(4, name="dense")(x)), None


def test_in_a_scan_with_remat_the_same():
    x = normal(8, 4)
    scanned, unrolled = (jqobs.linen.prepare_qat(Scanned(loop), W4A4) for loop in (True, False))
    variables = scanned.init(jax.random.key(0), x)
    layer = lambda i: jax.tree.map(lambda leaf: leaf[i], variables["params"]["blocks"])  # noqa: E731
    flat = {**unrolled.init(jax.random.key(0), x), "params": {f"block_{i}": layer(i) for i in range(2)}}

    def loss(model):
        def value(params, variables):
            y, updated = model.apply({**variables, "params": params}, x, mutable=["observers"])
            return (y**2).mean(), updated

        return jax.jit(jax.value_and_grad(value, has_aux=True))

    (_, updated), gradient = loss(scanned)(variables["params"], variables)
    (_, expected), expected_gradient = loss(unrolled)(flat["params"], flat)
    for i in range(2):
        for got, want in (
            (gradient["blocks"], expected_gradient),
            (updated["observers"]["blocks"], expected["observers"]),
        ):
            stacked = jax.tree.map(lambda leaf, i=i: np.float64(leaf[i]), got)
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, np.float64(b), rtol=1e-4, atol=1e-6),
                stacked,
                want[f"block_{i}"],
            )
    read = jqobs.linen.read_qparams(scanned, {**variables, **updated}, x)
    jax.tree.map(np.testing.assert_array_equal, read["observers"], updated["observers"])
