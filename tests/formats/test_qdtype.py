import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import jqobs

RANGES = {
    "qint8": (-128, 127, 8, "int8"),
    "quint8": (0, 255, 8, "uint8"),
    "qint4": (-8, 7, 4, "int8"),
    "quint4": (0, 15, 4, "uint8"),
    "qint2": (-2, 1, 2, "int8"),
    "quint2": (0, 3, 2, "uint8"),
    "qint16": (-32768, 32767, 16, "int16"),
    "quint16": (0, 65535, 16, "uint16"),
    "qint32": (-(2**31), 2**31 - 1, 32, "int32"),
}


@pytest.mark.parametrize("name", RANGES)
def test_the_nine_types(name):
    qdtype = getattr(jqobs, name)
    low, high, bits, storage = RANGES[name]
    assert (qdtype.name, qdtype.quant_min, qdtype.quant_max) == (name, low, high)
    assert (qdtype.bits, qdtype.levels, qdtype.storage) == (bits, high - low + 1, jnp.dtype(storage))
    assert repr(qdtype) == name


def test_a_custom_range_is_a_copy():
    narrow = dataclasses.replace(jqobs.qint8, quant_min=-127)
    assert narrow.levels == 255
    assert repr(narrow) == "replace(qint8, quant_min=-127)"
    assert hash(narrow) == hash(dataclasses.replace(jqobs.qint8, quant_min=np.int64(-127)))
    assert narrow != jqobs.qint8
    with pytest.raises(dataclasses.FrozenInstanceError):
        narrow.quant_min = 0  # pyright: ignore


@pytest.mark.parametrize(
    ("qdtype", "change", "says"),
    [
        ("quint8", {"quant_max": 300}, "quant_max=300"),
        ("qint4", {"quant_max": 9}, "quant_max=9"),
        ("quint8", {"quant_min": -1}, "quant_min=-1"),
        ("qint8", {"quant_min": 0, "quant_max": 0}, "smaller"),
        ("qint8", {"quant_min": 5, "quant_max": 3}, "quant_min=5, quant_max=3"),
        ("qint8", {"quant_min": 1}, "code 0"),
        ("qint8", {"quant_max": 1.5}, "quant_max must be an integer; got 1.5"),
        ("qint8", {"name": "int7"}, "name must be one of"),
    ],
)
def test_ranges_that_do_not_exist(qdtype, change, says):
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(getattr(jqobs, qdtype), **change)
