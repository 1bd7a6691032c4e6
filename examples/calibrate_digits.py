"""Calibrates a small CNN on real handwritten digits, and prints what each choice cost in accuracy.

    python examples/calibrate_digits.py

The data is the set of 1,797 scanned digits that ships inside scikit-learn; nothing is downloaded. The model knows
nothing of quantization. It is trained in float32, watched on images that were held back, and tested with weights and
activations on the 8-bit, the 4-bit and the 2-bit grids, once per statistic.
"""

import argparse

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

WEIGHT = jqobs.min_max(qscheme=jqobs.per_channel_symmetric, qdtype=jqobs.qint8)
"""A range for every output channel; which axis that is, the operation says."""


class CNN(nn.Module):
    """Two convolutions and two dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(16, (3, 3))(x))
        x = nn.relu(nn.Conv(32, (3, 3), strides=2)(x))
        x = nn.relu(nn.Dense(64)(x.reshape(x.shape[0], -1)))
        return nn.Dense(10)(x)


def split_digits() -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Images of 8 x 8 pixels from 0 to 1 and their digits: for training, for calibration, for the test."""
    digits = load_digits()
    images, labels = (digits.images[..., None] / 16).astype(np.float32), digits.target
    x, x_test, y, y_test = train_test_split(images, labels, test_size=600, random_state=0, stratify=labels)
    x_train, x_held, y_train, y_held = train_test_split(x, y, test_size=256, random_state=0, stratify=y)
    return (x_train, y_train), (x_held, y_held), (x_test, y_test)


def train(x: np.ndarray, y: np.ndarray, epochs: int) -> dict:
    """Trains in float32."""
    model, optimizer = CNN(), optax.adam(2e-3)
    variables = model.init(jax.random.key(0), x[:1])

    @jax.jit
    def epoch(carry, order):
        def step(carry, batch):
            variables, moments = carry

            def loss(variables):
                logits = model.apply(variables, jnp.asarray(x)[batch])
                return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(y)[batch]).mean()

            updates, moments = optimizer.update(jax.grad(loss)(variables), moments)
            return (optax.apply_updates(variables, updates), moments), None

        return jax.lax.scan(step, carry, order)[0]

    rng, carry = np.random.default_rng(0), (variables, optimizer.init(variables))
    for _ in range(epochs):
        carry = epoch(carry, rng.permutation(len(x))[: len(x) // 32 * 32].reshape(-1, 32))
    return carry[0]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--epochs", type=int, default=20, help="epochs of training in float32")
    arguments.add_argument("--statistics", nargs="+", choices=STATISTICS, default=list(STATISTICS))
    options = arguments.parse_args()

    (x_train, y_train), (x_held, _), (x_test, y_test) = split_digits()
    print(f"training on {len(x_train)} digits for {options.epochs} epochs ...")
    variables, apply = train(x_train, y_train, options.epochs), CNN().apply

    def accuracy(fn):
        return float((jax.jit(fn)(variables, x_test).argmax(-1) == y_test).mean())

    batches = [(variables, images) for images in np.split(x_held, len(x_held) // 32)]
    costs, in_float = [], accuracy(apply)
    for name in options.statistics:
        statistic = STATISTICS[name]
        calibration = jqobs.observe(apply, jqobs.QConfig(activation=statistic(), weight=WEIGHT), weight_argnums=0)
        state = jqobs.calibrate(calibration, batches)
        cost = [in_float]
        for activation, weight in GRIDS:
            # Collected once, read at every width: a state does not depend on the grid.
            narrow = jqobs.QConfig(activation=statistic(qdtype=activation), weight=WEIGHT.replace(qdtype=weight))
            qparams = calibration.calculate_qparams(state, narrow)
            cost.append(accuracy(jqobs.simulate(apply, qparams)))
            if activation is jqobs.quint8:
                print(f"\n{narrow!r} on {len(x_held)} held-back digits")
                print(jqobs.report(state, qparams))
        costs.append((name, *cost))

    print(f"\naccuracy on {len(x_test)} test digits, with weights (per channel) and activations on the grid")
    print(f"{'statistic':24}{'float32':>10}" + "".join(f"{f'{weight.bits} bits':>10}" for _, weight in GRIDS))
    for name, *cost in costs:
        print(f"{name:24}" + "".join(f"{value:>10.2%}" for value in cost))


if __name__ == "__main__":
    main()
