import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jqobs
from jqobs.formats.granularity import Granularity


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_spread_undoes_split(shape, data):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    row = int(np.prod(shape)) // shape[axis]
    size = data.draw(st.sampled_from([None, *(n for n in range(1, row + 1) if row % n == 0)]))
    granularity = Granularity(jqobs.per_channel_affine, axis, size)
    x = np.arange(np.prod(shape)).reshape(shape)
    split = granularity.split(jnp.asarray(x))
    assert split.shape[: granularity.rank] == granularity.shape_for(x.shape)
    labels = jnp.arange(np.prod(granularity.shape_for(x.shape))).reshape(granularity.shape_for(x.shape))
    spread = np.broadcast_to(granularity.broadcast_to(labels, x.shape), x.shape)
    for label in np.asarray(labels).ravel():
        members = np.asarray(split)[tuple(np.argwhere(np.asarray(labels) == label)[0])]
        assert set(members.ravel().tolist()) == set(x[spread == label].tolist())


def test_shapes():
    assert Granularity(jqobs.per_tensor_affine).shape_for((2, 3)) == ()
    assert Granularity(jqobs.per_channel_affine, -1).shape_for((2, 3)) == (3,)
    assert Granularity(jqobs.per_channel_affine, 0, 4).shape_for((2, 12)) == (2, 3)
    assert [Granularity(jqobs.per_tensor_affine).rank, Granularity(jqobs.per_channel_affine, 0, 4).rank] == [0, 2]


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
        Granularity(*arguments)
