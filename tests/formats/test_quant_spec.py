import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jqobs
from jqobs import QuantSpec


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_spread_undoes_split(shape, data):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    row = int(np.prod(shape)) // shape[axis]
    size = data.draw(st.sampled_from([None, *(n for n in range(1, row + 1) if row % n == 0)]))
    spec = QuantSpec(jqobs.qint8, jqobs.per_channel_affine, axis, size)
    x = np.arange(np.prod(shape)).reshape(shape)
    split = spec.split(jnp.asarray(x))
    assert split.shape[: spec.rank] == spec.shape_for(x.shape)
    labels = jnp.arange(np.prod(spec.shape_for(x.shape))).reshape(spec.shape_for(x.shape))
    spread = np.broadcast_to(spec.broadcast_to(labels, x.shape), x.shape)
    for label in np.asarray(labels).ravel():
        members = np.asarray(split)[tuple(np.argwhere(np.asarray(labels) == label)[0])]
        assert set(members.ravel().tolist()) == set(x[spread == label].tolist())


def test_shapes():
    assert QuantSpec(jqobs.qint8, jqobs.per_tensor_affine).shape_for((2, 3)) == ()
    assert QuantSpec(jqobs.qint8, jqobs.per_channel_affine, -1).shape_for((2, 3)) == (3,)
    assert QuantSpec(jqobs.qint8, jqobs.per_channel_affine, 0, 4).shape_for((2, 12)) == (2, 3)
    assert [
        QuantSpec(jqobs.qint8, jqobs.per_tensor_affine).rank,
        QuantSpec(jqobs.qint8, jqobs.per_channel_affine, 0, 4).rank,
    ] == [0, 2]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((jqobs.per_tensor_affine, 0), "ch_axis needs a per-channel qscheme; got ch_axis=0"),
        ((jqobs.per_tensor_affine, None, 4), "group_size needs a per-channel qscheme"),
        ((jqobs.per_channel_affine, 0, 0), "group_size must be at least 1; got 0"),
        ((jqobs.per_channel_affine, 1.0), "ch_axis must be an integer; got 1.0"),
        ((jqobs.per_channel_affine, True), "ch_axis must be an integer; got True"),
    ],
)
def test_contradictions(arguments, says):
    with pytest.raises(ValueError, match=says):
        QuantSpec(jqobs.qint8, *arguments)


def test_eps_by_default():
    assert QuantSpec(jqobs.quint16).eps == 1e-8
    assert QuantSpec(jqobs.qint32).eps == np.finfo(np.float32).smallest_normal
    assert QuantSpec(jqobs.qint8, eps=1e-12).eps == 1e-12


@pytest.mark.parametrize("eps", [0, -1, float("nan"), float("inf"), 1e-45, "small"])
def test_an_eps_that_float32_cannot_hold(eps):
    with pytest.raises(ValueError, match="eps must be"):
        QuantSpec(jqobs.qint8, eps=eps)


def test_a_change_keeps_what_was_given_and_renews_what_was_not():
    spec = QuantSpec(jqobs.qint8, jqobs.per_channel_symmetric, -1, 4)
    assert spec.replace(qdtype=jqobs.qint32).eps == QuantSpec(jqobs.qint32).eps
    assert spec.replace(eps=1e-3).replace(qdtype=jqobs.qint32).eps == 1e-3
    assert spec.replace(group_size=None) == QuantSpec(jqobs.qint8, jqobs.per_channel_symmetric, -1)
    assert spec.per_tensor == QuantSpec(jqobs.qint8, jqobs.per_tensor_symmetric)
    assert len({spec, spec.replace(), spec.replace(ch_axis=np.int64(-1))}) == 1


@pytest.mark.parametrize(("field", "wrong"), [("qdtype", "int8"), ("qdtype", jnp.int8), ("qscheme", "affine")])
def test_what_is_no_type(field, wrong):
    with pytest.raises(ValueError, match=f"{field} must be a Q"):
        QuantSpec(**{field: wrong})
