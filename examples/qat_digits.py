"""Trains a small CNN with the grid in place, and shows what that wins over calibrating it afterwards.

    python examples/qat_digits.py

The model and the data are those of `calibrate_digits.py`. It is trained in float32, calibrated and rounded, and then
trained on for two epochs with its weights and activations on the grid; the same at 4 and at 2 bits. The picture
`qat_digits.png` shows the losses, and the weights of one layer before and after.
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from calibrate_digits import CNN, split_digits, train

import jqobs

GRIDS = {"W4A4": (jqobs.quint4, jqobs.qint4), "W2A2": (jqobs.quint2, jqobs.qint2)}
LAYER = "Conv_1"


def config_of(activation: jqobs.QDtype, weight: jqobs.QDtype) -> jqobs.QConfig:
    """The defaults for training, on another grid."""
    default = jqobs.get_default_qat_qconfig()
    return jqobs.QConfig(default.activation.replace(qdtype=activation), default.weight.replace(qdtype=weight))


def train_on_grid(variables: dict, config: jqobs.QConfig, x: np.ndarray, y: np.ndarray, epochs: int) -> tuple:
    """Goes on from the weights of a float model; returns the variables and the loss of every step."""
    model = jqobs.linen.prepare_qat(CNN(), config)
    variables = {**model.init(jax.random.key(0), x[:1]), **variables}
    optimizer = optax.adam(5e-4)
    moments, rng, losses = optimizer.init(variables["params"]), np.random.default_rng(1), []

    @jax.jit
    def step(variables, moments, x, y):
        def loss(params):
            logits, updated = model.apply({**variables, "params": params}, x, mutable=["observers"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), updated

        (value, updated), gradient = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        updates, moments = optimizer.update(gradient, moments)
        return {**updated, "params": optax.apply_updates(variables["params"], updates)}, moments, value

    for _ in range(epochs):
        for batch in rng.permutation(len(x))[: len(x) // 32 * 32].reshape(-1, 32):
            variables, moments, value = step(variables, moments, jnp.asarray(x[batch]), jnp.asarray(y[batch]))
            losses.append(float(value))
    return variables, losses


def draw(path: pathlib.Path, losses: dict, before: np.ndarray, after: np.ndarray, qparams: jqobs.QParams) -> None:
    """The losses, and the weights of the first output channel among the values of its grid."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, curve in losses.items():
        left.plot(np.convolve(curve, np.ones(5) / 5, "valid"), label=name)
    left.set(xlabel="step", ylabel="training loss (mean of 5)", yscale="log", title="two epochs on the grid")
    left.legend()
    codes = np.arange(qparams.qdtype.quant_min, qparams.qdtype.quant_max + 1)
    for value in codes * float(qparams.scale[0]):
        right.axvline(value, color="0.85", zorder=0)
    bins = np.linspace(codes[0] - 0.5, codes[-1] + 0.5, 4 * len(codes) + 1) * float(qparams.scale[0])
    right.hist(before[..., 0].ravel(), bins, histtype="step", label="before", linewidth=2)
    right.hist(after[..., 0].ravel(), bins, histtype="stepfilled", label="after", alpha=0.5)
    right.set(xlabel="weight", ylabel="how many", title=f"{LAYER}, first channel, {qparams.qdtype!r} (lines: its grid)")
    right.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--epochs", type=int, default=20, help="epochs of training in float32")
    arguments.add_argument("--picture", type=pathlib.Path, default=pathlib.Path("qat_digits.png"))
    options = arguments.parse_args()

    (x_train, y_train), (x_held, _), (x_test, y_test) = split_digits()
    print(f"training on {len(x_train)} digits for {options.epochs} epochs in float32, and 2 epochs on each grid ...")
    variables, model = train(x_train, y_train, options.epochs), CNN()

    def accuracy(apply, variables):
        return float((jax.jit(apply)(variables, x_test).argmax(-1) == y_test).mean())

    rows, losses, pictures = [], {}, {}
    for name, grid in GRIDS.items():
        config = config_of(*grid)
        calibration = jqobs.observe(model.apply, config, weight_argnums=0)
        state = jqobs.calibrate(calibration, [(variables, images) for images in np.split(x_held, 8)])
        calibrated = jqobs.simulate(model.apply, calibration.calculate_qparams(state))
        trained, losses[name] = train_on_grid(variables, config, x_train, y_train, epochs=2)
        qat = jqobs.linen.prepare_qat(model, config)
        rows.append(
            (name, accuracy(model.apply, variables), accuracy(calibrated, variables), accuracy(qat.apply, trained))
        )
        weight = jqobs.linen.calculate_qparams(qat, trained, x_test[:1])[f"{LAYER}/weight"]
        pictures[name] = (variables["params"][LAYER]["kernel"], trained["params"][LAYER]["kernel"], weight)

    print(f"\naccuracy on {len(x_test)} test digits")
    print(f"{'grid':8}{'float32':>10}{'calibrated':>14}{'trained on it':>16}")
    for name, *accuracies in rows:
        print(f"{name:8}{accuracies[0]:>10.2%}{accuracies[1]:>14.2%}{accuracies[2]:>16.2%}")
    draw(options.picture, losses, *pictures["W4A4"])
    print(f"wrote {options.picture}")


if __name__ == "__main__":
    main()
