"""What torch.ao.quantization.FakeQuantize (the unfused path) answers: values and gradients.

`python tests/reference/record_fake_quantize.py` writes record_fake_quantize.json again, with torch 2.13 installed.
"""

import itertools
import json
import pathlib

import numpy as np

ANSWERS = pathlib.Path(__file__).with_suffix(".json")
SCHEMES = ["per_tensor_affine", "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric"]
BITS = [8, 4]


def keys():
    return [f"{scheme}/{bits}" for scheme, bits in itertools.product(SCHEMES, BITS)]


def batches():
    """One to observe, then a wilder one to round with the observer off."""
    rng = np.random.default_rng(5)
    return [(rng.standard_normal((3, 8)) * scale + 0.3).astype(np.float32) for scale in (1, 2)]


def answer(key):
    import torch
    from torch.ao import quantization

    scheme, bits = key.split("/")
    channels, symmetric = scheme.startswith("per_channel"), scheme.endswith("symmetric")
    levels = 2 ** int(bits)
    observer = quantization.PerChannelMinMaxObserver if channels else quantization.MinMaxObserver
    layer = quantization.FakeQuantize(
        observer=observer,
        dtype=torch.qint8 if symmetric else torch.quint8,
        qscheme=getattr(torch, scheme),
        quant_min=-levels // 2 if symmetric else 0,
        quant_max=levels // 2 - 1 if symmetric else levels - 1,
        eps=1e-8,
        **({"ch_axis": 0} if channels else {}),
    )
    first, second = (torch.from_numpy(batch) for batch in batches())
    layer(first)
    layer.disable_observer()
    second.requires_grad_()
    out = layer(second)
    out.sum().backward()
    return {"out": out.detach().numpy().tolist(), "gradient": second.grad.numpy().tolist()}


if __name__ == "__main__":
    ANSWERS.write_text(json.dumps({key: answer(key) for key in keys()}) + "\n")
