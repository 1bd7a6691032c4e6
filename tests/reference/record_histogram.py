"""What torch.ao.quantization.observer.HistogramObserver answers to streams of batches.

`python tests/reference/record_histogram.py` writes record_histogram.json again, with torch 2.13 installed.
"""

import itertools
import json
import pathlib
import warnings

import numpy as np

ANSWERS = pathlib.Path(__file__).with_suffix(".json")
SIZE = 4096

SHAPES = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "laplace": lambda rng, n: rng.laplace(0, 1, n),
    "student": lambda rng, n: rng.standard_t(3, n),
    "relu": lambda rng, n: np.maximum(rng.standard_normal(n), 0),
    "gamma": lambda rng, n: rng.gamma(2, 2, n),
    "log_normal": lambda rng, n: rng.lognormal(0, 1, n),
    "bimodal": lambda rng, n: rng.standard_normal(n) * 0.3 + rng.choice([-2, 3], n),
    "uniform": lambda rng, n: rng.uniform(-1, 1, n),
    "shifted": lambda rng, n: rng.standard_normal(n) + 6,
    "negative": lambda rng, n: -rng.exponential(2, n),
}

SEQUENCES = {
    "one": [1.0],
    "inside": [1.0, 0.5, 0.25],  # The range of the first batch holds the others.
    "growing": [0.5, 1.0, 1.3, 2.0],
}
"""What the batches of a stream are multiplied by."""


def stream(shape, sequence):
    rng = np.random.default_rng([ord(letter) for letter in shape])
    first = SHAPES[shape](rng, SIZE)
    batches = [first * SEQUENCES[sequence][0]] + [
        SHAPES[shape](rng, SIZE) * factor for factor in SEQUENCES[sequence][1:]
    ]
    if sequence == "inside":
        batches = [np.clip(batch, first.min(), first.max()) for batch in batches]
    return [batch.astype(np.float32) for batch in batches]


def keys():
    return [
        "/".join(key) for key in itertools.product(("per_tensor_affine", "per_tensor_symmetric"), SHAPES, SEQUENCES)
    ]


def answer(key):
    """The scale, the zero point, and what the histogram sums to."""
    import torch
    from torch.ao.quantization.observer import HistogramObserver

    scheme, shape, sequence = key.split("/")
    dtype = torch.quint8 if scheme.endswith("affine") else torch.qint8
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        watcher = HistogramObserver(dtype=dtype, qscheme=getattr(torch, scheme), eps=1e-8)
        for batch in stream(shape, sequence):
            watcher(torch.from_numpy(batch))
        scale, zero_point = watcher.calculate_qparams()
    return {"scale": scale.item(), "zero_point": zero_point.item(), "sum": float(watcher.histogram.sum())}


if __name__ == "__main__":
    ANSWERS.write_text(json.dumps({key: answer(key) for key in keys()}, indent=0) + "\n")
