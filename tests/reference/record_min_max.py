"""What torch.ao.quantization.observer answers for the min/max family.

`python tests/reference/record_min_max.py` writes record_min_max.json again, with torch 2.13 installed.
"""

import itertools
import json
import pathlib

import numpy as np
from streams import DISTRIBUTIONS, stream

ANSWERS = pathlib.Path(__file__).with_suffix(".json")
EPS = 1e-8
SCHEMES = ["per_tensor_affine", "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric"]
STATISTICS = ["min_max", "moving_average_min_max"]
QDTYPES = ["quint8", "qint8"]


def keys():
    return ["/".join(key) for key in itertools.product(STATISTICS, SCHEMES, QDTYPES, DISTRIBUTIONS)]


def answer(key):
    """The scale and the zero point after four batches, as nested lists."""
    import torch
    from torch.ao.quantization import observer

    statistic, scheme, qdtype, distribution = key.split("/")
    average, channels = statistic.startswith("moving"), scheme.startswith("per_channel")
    name = f"{'MovingAverage' * average}{'PerChannel' * channels}MinMaxObserver"
    arguments = {"dtype": getattr(torch, qdtype), "qscheme": getattr(torch, scheme), "eps": EPS}
    arguments |= {"averaging_constant": 0.1} if average else {}
    arguments |= {"ch_axis": 1} if channels else {}
    watcher = getattr(observer, name)(**arguments)
    for batch in stream(distribution):
        watcher(torch.from_numpy(batch))
    scale, zero_point = watcher.calculate_qparams()
    squeeze = (lambda values: values) if channels else (lambda values: values[0])
    return {"scale": np.float32(squeeze(scale.numpy())).tolist(), "zero_point": squeeze(zero_point.numpy()).tolist()}


if __name__ == "__main__":
    ANSWERS.write_text(json.dumps({key: answer(key) for key in keys()}, indent=0) + "\n")
