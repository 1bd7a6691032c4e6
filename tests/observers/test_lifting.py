"""A statistic from outside: what a third party writes is as good as the catalogue."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqobs
from jqobs.numerics.counting import count


class AbsMaxState(NamedTuple):
    abs_max: jax.Array
    seen: jqobs.Count
    nonfinite: jqobs.Count


def init():
    return AbsMaxState(abs_max=jnp.float32(0), seen=count(), nonfinite=count())


def summarize(chunk, state):
    return init()._replace(abs_max=jnp.max(jnp.abs(chunk.x), initial=0, where=chunk.where))


def merge(a, b):
    return a._replace(abs_max=jnp.maximum(a.abs_max, b.abs_max))


ABS_MAX = jqobs.Statistic(
    name="abs_max", init=init, summarize=summarize, reduce=merge, fold=merge, merge=merge,
    bounds=lambda state, grid: (-state.abs_max, state.abs_max),
)  # fmt: skip


@jqobs.factory
def abs_max(*, qscheme=jqobs.per_tensor_symmetric, qdtype=jqobs.qint8, ch_axis=None, group_size=None, eps=None):
    return jqobs.lift(ABS_MAX, qscheme=qscheme, qdtype=qdtype, ch_axis=ch_axis, group_size=group_size, eps=eps)


def test_a_statistic_of_a_third_party():
    observer = abs_max(qscheme=jqobs.per_channel_symmetric, ch_axis=1)
    x = jnp.array([[1, -2], [jnp.nan, 1]], jnp.float32)
    state = jqobs.calibrate(observer, [x, x / 2])
    assert state.abs_max.tolist() == [1, 2]
    assert np.asarray(state.nonfinite).tolist() == [2, 0]
    np.testing.assert_allclose(observer.calculate_qparams(state).scale, np.float32([1, 2]) / 127.5, rtol=2e-7)
    assert repr(observer) == "abs_max(qscheme=per_channel_symmetric, ch_axis=1)"
    with pytest.raises(jqobs.NotCalibratedError, match="abs_max"):
        observer.calculate_qparams(observer.init(x))


def test_a_reader_of_another_granularity_is_refused():
    per_tensor, per_channel = jqobs.min_max(), jqobs.min_max(qscheme=jqobs.per_channel_affine, ch_axis=0)
    state = per_tensor.update(per_tensor.init(jnp.ones(3)), jnp.ones(3))
    with pytest.raises(ValueError, match=r"a whole tensor.*rank 1"):
        per_channel.calculate_qparams(state)


def test_building_an_observer_starts_no_backend():
    """Or `jax.distributed.initialize` could not follow `import jqobs`."""
    import subprocess
    import sys

    code = (
        "import jqobs; jqobs.min_max(); jqobs.log_histogram(); jqobs.linen.default_observer(); "
        "from jax._src import xla_bridge; assert not xla_bridge._backends, xla_bridge._backends"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
