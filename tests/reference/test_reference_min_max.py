"""Scale to one ulp and zero point exactly, against PyTorch."""

import json
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
import record_min_max
from streams import stream

import jqobs

RECORDED = json.loads(record_min_max.ANSWERS.read_text())


@pytest.mark.parametrize("key", record_min_max.keys())
def test_scale_and_zero_point(key):
    statistic, scheme, qdtype, distribution = key.split("/")
    arguments = {"qscheme": getattr(jqobs, scheme), "qdtype": getattr(jqobs, qdtype), "eps": record_min_max.EPS}
    arguments |= {"averaging_constant": 0.1} if statistic.startswith("moving") else {}
    arguments |= {"ch_axis": 1} if scheme.startswith("per_channel") else {}
    observer = getattr(jqobs, statistic)(**arguments)
    scale, zero_point = observer.calculate_qparams(
        jqobs.calibrate(observer, [jnp.asarray(batch) for batch in stream(distribution)])
    )
    expected = RECORDED[key]
    np.testing.assert_array_max_ulp(np.asarray(scale), np.float32(expected["scale"]), maxulp=1)
    np.testing.assert_array_equal(zero_point, expected["zero_point"])


def test_the_records_are_complete_and_varied():
    assert list(RECORDED) == record_min_max.keys()
    assert len({json.dumps(answer) for answer in RECORDED.values()}) > len(RECORDED) / 3


def test_the_records_are_what_torch_answers_today():
    pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert {key: record_min_max.answer(key) for key in RECORDED} == RECORDED
