"""Values and gradients of FakeQuantize, and its state dictionary, against PyTorch."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import record_fake_quantize

import jqobs

RECORDED = json.loads(record_fake_quantize.ANSWERS.read_text())


def layer_for(key):
    scheme, bits = key.split("/")
    qdtype = getattr(jqobs, f"q{'' if scheme.endswith('symmetric') else 'u'}int{bits}")
    channels = {"ch_axis": 0} if scheme.startswith("per_channel") else {}
    return jqobs.nnx.FakeQuantize(jqobs.min_max(qscheme=getattr(jqobs, scheme), qdtype=qdtype, **channels))


@pytest.mark.parametrize("key", record_fake_quantize.keys())
def test_values_and_gradients(key):
    layer, (first, second) = layer_for(key), map(jnp.asarray, record_fake_quantize.batches())
    layer(first)
    layer.disable_observer()
    out, pull = jax.vjp(lambda x: layer(x, observer_enabled=False), second)
    np.testing.assert_allclose(out, np.float32(RECORDED[key]["out"]), rtol=1e-6)
    np.testing.assert_array_equal(pull(jnp.ones_like(out))[0], RECORDED[key]["gradient"])


def test_the_records_are_complete_and_varied():
    assert list(RECORDED) == record_fake_quantize.keys()
    for answer in RECORDED.values():
        assert 0.2 < np.mean(answer["gradient"]) < 0.98


def test_the_records_are_what_torch_answers_today():
    pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert {key: record_fake_quantize.answer(key) for key in RECORDED} == RECORDED


def test_a_calibration_made_there_is_brought_along():
    torch = pytest.importorskip("torch")
    from torch.ao import quantization

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        there = torch.nn.Module()
        there.histogram = quantization.HistogramObserver(bins=16)
        there.channels = quantization.PerChannelMinMaxObserver(ch_axis=0)
        there.quantizer = quantization.FakeQuantize(
            observer=quantization.MinMaxObserver, quant_min=0, quant_max=255, eps=1e-8
        )
        batch = record_fake_quantize.batches()[0]
        for child in there.children():
            child(torch.from_numpy(batch))
        grids = {name: child.calculate_qparams() for name, child in there.named_children()}
        converted = jqobs.convert_torch_state_dict({key: value.numpy() for key, value in there.state_dict().items()})

    class Here(jqobs.nnx.ObserverBase.__mro__[2]):  # An nnx.Module.
        def __init__(self):
            self.histogram = jqobs.nnx.HistogramObserver(bins=16)
            self.channels = jqobs.nnx.PerChannelMinMaxObserver(ch_axis=0)
            self.quantizer = jqobs.nnx.FakeQuantize(jqobs.min_max())

    here = Here()
    jqobs.nnx.load_observer_state_dict(here, converted)
    assert int(here.histogram.state.get_value().seen) == batch.size
    np.testing.assert_array_equal(here.channels.min_val, batch.min(1))
    scale, zero_point = here.quantizer.calculate_qparams()
    np.testing.assert_allclose(scale, grids["quantizer"][0].item(), rtol=1e-6)
    assert int(zero_point) == grids["quantizer"][1].item()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = there.quantizer(torch.from_numpy(batch)).detach().numpy()
    np.testing.assert_allclose(here.quantizer(jnp.asarray(batch)), expected, rtol=1e-6)
