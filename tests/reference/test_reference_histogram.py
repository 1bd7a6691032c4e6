"""The walk of PyTorch over the same histogram: a bin at most where the range grew, equal where not."""

import json

import numpy as np
import pytest
import record_histogram

import jqobs

RECORDED = json.loads(record_histogram.ANSWERS.read_text())


@pytest.mark.parametrize("scheme", ["per_tensor_affine", "per_tensor_symmetric"])
def test_scale_and_zero_point(scheme):
    qscheme = getattr(jqobs, scheme)
    qdtype = jqobs.qint8 if qscheme.is_symmetric else jqobs.quint8
    observer = jqobs.histogram(range_rule=jqobs.norm_minimization(), qscheme=qscheme, qdtype=qdtype, eps=1e-8)
    answered = 0
    for key, expected in RECORDED.items():
        if not key.startswith(scheme + "/"):
            continue
        _, shape, sequence = key.split("/")
        state = jqobs.calibrate(observer, record_histogram.stream(shape, sequence))
        scale, zero_point = (np.asarray(leaf) for leaf in observer.calculate_qparams(state))
        assert np.asarray(state.histogram).sum() == int(state.seen), key
        assert abs(int(state.seen) - expected["sum"]) < 0.01, key  # A float sum, which loses a little.
        if sequence == "growing":
            bin_width = (state.max_val - state.min_val) / 2048
            assert abs(scale - expected["scale"]) * 255 <= bin_width, key
            assert abs(zero_point - expected["zero_point"]) <= 1, key
        else:
            np.testing.assert_array_max_ulp(scale, np.float32(expected["scale"]), maxulp=1)
            assert zero_point == expected["zero_point"], key
        answered += 1
    assert answered == 30


def test_the_records_are_what_torch_answers_today():
    pytest.importorskip("torch")
    assert list(RECORDED) == record_histogram.keys()
    for key in list(RECORDED)[::7]:
        assert record_histogram.answer(key) == RECORDED[key]
