"""The twelve kinds of data that ranges are compared on, each 40,000 values in 8 batches."""

import numpy as np

VALUES, BATCHES = 40_000, 8


def _outliers(rng, n):
    x = rng.standard_normal(n)
    far = rng.random(n) < 0.001
    return np.where(far, rng.uniform(20, 60, n) * rng.choice([-1, 1], n), x)


def _one_outlier(rng, n):
    x = rng.standard_normal(n)
    x[n // 3] = 50
    return x


def _gelu(rng, n):
    x = rng.standard_normal(n)
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _softmax(rng, n):
    rows = np.exp(2 * rng.standard_normal((n // 50, 50)))
    return (rows / rows.sum(-1, keepdims=True)).ravel()


DISTRIBUTIONS = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "laplace": lambda rng, n: rng.laplace(0, 1, n),
    "student-t3": lambda rng, n: rng.standard_t(3, n),
    "relu": lambda rng, n: np.maximum(rng.standard_normal(n), 0),
    "gelu": _gelu,
    "log-normal": lambda rng, n: rng.lognormal(0, 1, n),
    "0.1% outliers": _outliers,
    "one outlier": _one_outlier,
    "bimodal": lambda rng, n: rng.standard_normal(n) * 0.3 + rng.choice([-2, 3], n),
    "uniform": lambda rng, n: rng.uniform(-1, 1, n),
    "softmax": _softmax,
    "shifted": lambda rng, n: rng.standard_normal(n) + 6,
}


def sample(name, seed=0):
    """The batches of a distribution, float32 `[8, 5000]`."""
    rng = np.random.default_rng([seed, *map(ord, name)])
    return DISTRIBUTIONS[name](rng, VALUES).astype(np.float32).reshape(BATCHES, -1)
