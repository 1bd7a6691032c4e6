"""The data that PyTorch's answers are recorded for; made again from its description, never stored."""

import numpy as np

DISTRIBUTIONS = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "shifted": lambda rng, shape: rng.standard_normal(shape) + 9,
    "negative": lambda rng, shape: -rng.exponential(3, shape) - 1,
    "skewed": lambda rng, shape: rng.lognormal(0, 2, shape),
    "relu": lambda rng, shape: np.maximum(rng.standard_normal(shape), 0),
    "outlier": lambda rng, shape: rng.standard_t(2, shape) * 10,
    "tiny": lambda rng, shape: rng.standard_normal(shape) * 1e-6,
    "huge": lambda rng, shape: rng.standard_normal(shape) * 1e30,
    "constant": lambda rng, shape: np.full(shape, 5.0),
    "negative_constant": lambda rng, shape: np.full(shape, -3.0),
    "zeros": lambda rng, shape: np.zeros(shape),
    "integers": lambda rng, shape: rng.integers(-5, 8, shape),
}


def stream(name, batches=4, shape=(6, 5)):
    """The batches of a distribution, float32."""
    rng = np.random.default_rng([ord(letter) for letter in name])
    return [DISTRIBUTIONS[name](rng, shape).astype(np.float32) for _ in range(batches)]
