"""Calibrates a small CNN on real handwritten digits, and prints what each choice cost in accuracy.

    python examples/calibrate_digits.py

The data is the set of 1,797 scanned digits that ships inside scikit-learn; nothing is downloaded. The model is trained
in float32, watched by inline observers on images that were held back, and tested with weights and activations on the
8-bit, the 4-bit and the 2-bit grids, once per statistic.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jqobs

STATISTICS = {
    "min_max": jqobs.min_max,
    "moving_average_min_max": jqobs.moving_average_min_max,
    "mean_min_max": jqobs.mean_min_max,
    "log_histogram": jqobs.log_histogram,
}
GRIDS = [(jqobs.quint8, jqobs.qint8), (jqobs.quint4, jqobs.qint4), (jqobs.quint2, jqobs.qint2)]
"""The types of activations and of weights."""


class CNN(nn.Module):
    """Two convolutions and two dense layers, with an observer in front of each."""

    observer: jqobs.Observer = jqobs.min_max()
    qparams: dict[str, jqobs.QParams] | None = None  # Once calibrated: the grids that activations are rounded to.

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(16, (3, 3))(self.watch("conv_0_input", x)))
        x = nn.relu(nn.Conv(32, (3, 3), strides=2)(self.watch("conv_1_input", x)))
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(64)(self.watch("dense_0_input", x)))
        return nn.Dense(10)(self.watch("dense_1_input", x))

    def watch(self, name: str, x: jax.Array) -> jax.Array:
        x = jqobs.linen.Observe(self.observer, name=name)(x)
        return x if self.qparams is None else jqobs.fake_quantize(x, self.qparams[name])


def split_digits() -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Images of 8 x 8 pixels from 0 to 1 and their digits: for training, for calibration, for the test."""
    digits = load_digits()
    images, labels = (digits.images[..., None] / 16).astype(np.float32), digits.target
    x, x_test, y, y_test = train_test_split(images, labels, test_size=600, random_state=0, stratify=labels)
    x_train, x_held, y_train, y_held = train_test_split(x, y, test_size=256, random_state=0, stratify=y)
    return (x_train, y_train), (x_held, y_held), (x_test, y_test)


def train(x: np.ndarray, y: np.ndarray, epochs: int) -> dict:
    """Trains in float32; the collection "observers" is not mutable here, so that nothing is watched."""
    model, optimizer = CNN(), optax.adam(2e-3)
    params = model.init(jax.random.key(0), x[:1])["params"]

    @jax.jit
    def epoch(carry, order):
        def step(carry, batch):
            params, moments = carry

            def loss(params):
                logits = model.apply({"params": params}, jnp.asarray(x)[batch])
                return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(y)[batch]).mean()

            updates, moments = optimizer.update(jax.grad(loss)(params), moments)
            return (optax.apply_updates(params, updates), moments), None

        return jax.lax.scan(step, carry, order)[0]

    rng, carry = np.random.default_rng(0), (params, optimizer.init(params))
    for _ in range(epochs):
        carry = epoch(carry, rng.permutation(len(x))[: len(x) // 32 * 32].reshape(-1, 32))
    return carry[0]


def calibrate(observer: jqobs.Observer, params: dict, images: np.ndarray) -> dict:
    """Watches the held-back images in batches of 32, and returns the states of the observers."""
    model = CNN(observer)

    def step(observers, batch):
        logits, updated = model.apply({"params": params, "observers": observers}, batch, mutable=["observers"])
        return logits, updated["observers"]

    empty = model.init(jax.random.key(0), images[:1])["observers"]
    states = jqobs.calibrate(step, np.split(images, len(images) // 32), state=empty)
    jqobs.linen.check_observed(model, {"params": params, "observers": states}, images[:1])
    return states


def quantize_weights(params: dict, qdtype: jqobs.QDtype) -> dict:
    """Rounds every kernel to a grid of its own per output channel, its last axis."""
    observer = jqobs.min_max(qscheme=jqobs.per_channel_symmetric, qdtype=qdtype, ch_axis=-1)

    def on_grid(path, leaf):
        if path[-1].key != "kernel":
            return leaf
        state = observer.update(observer.init(leaf), leaf)
        return jqobs.fake_quantize(leaf, observer.calculate_qparams(state))

    return jax.tree_util.tree_map_with_path(on_grid, params)


@functools.partial(jax.jit, static_argnums=0)
def logits_of(observer: jqobs.Observer, qparams: dict | None, params: dict, x: jax.Array) -> jax.Array:
    return CNN(observer, qparams).apply({"params": params}, x)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--epochs", type=int, default=20, help="epochs of training in float32")
    epochs = arguments.parse_args().epochs

    (x_train, y_train), (x_held, _), (x_test, y_test) = split_digits()
    print(f"training on {len(x_train)} digits for {epochs} epochs ...")
    params = train(x_train, y_train, epochs)

    def accuracy(observer, qparams, params):
        return float((logits_of(observer, qparams, params, x_test).argmax(-1) == y_test).mean())

    costs = []
    for name, factory in STATISTICS.items():
        states = calibrate(factory(), params, x_held)
        cost = [accuracy(factory(), None, params)]
        for activation, weight in GRIDS:
            # Collected once, read at every width: a state does not depend on the grid.
            observer = factory(qdtype=activation)
            variables = {"params": params, "observers": states}
            qparams = jqobs.linen.calculate_qparams(CNN(observer), variables, x_held[:1])
            cost.append(accuracy(observer, qparams, quantize_weights(params, weight)))
            if activation is jqobs.quint8:
                print(f"\n{observer!r} on {len(x_held)} held-back digits")
                print(jqobs.report(states, qparams))
        costs.append((name, *cost))

    print(f"\naccuracy on {len(x_test)} test digits, with weights (per channel) and activations on the grid")
    print(f"{'statistic':24}{'float32':>10}" + "".join(f"{f'{weight.bits} bits':>10}" for _, weight in GRIDS))
    for name, *cost in costs:
        print(f"{name:24}" + "".join(f"{value:>10.2%}" for value in cost))


if __name__ == "__main__":
    main()
