import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jqobs.numerics import counting
from jqobs.numerics.counting import Count, add, count

WORDS = st.integers(0, 2**63 - 1)


@given(WORDS, WORDS)
def test_add_is_exact(a, b):
    assert int(add(count(a), count(b))) == a + b


@pytest.mark.parametrize("start", [2**24, 2**31 - 1, 2**32 - 1, 2**33])
def test_it_does_not_stall_or_wrap(start):
    total = jax.jit(lambda total: jax.lax.fori_loop(0, 4, lambda _, n: add(n, count(1)), total))(count(start))
    assert total == start + 4


def test_it_reads_as_a_number():
    many = Count(low=jnp.array([1, 2], jnp.uint32), high=jnp.array([0, 1], jnp.uint32))
    assert np.asarray(many).dtype == np.uint64
    assert np.asarray(many).tolist() == [1, 2**32 + 2]
    assert np.asarray(many, np.float64).tolist() == [1.0, 2.0**32 + 2]
    assert np.array_equal(many, [1, 2**32 + 2])
    assert (many == 1).tolist() == [True, False]
    assert (many != 1).tolist() == [False, True]
    assert many.shape == (2,)
    assert repr(many) == f"Count([1, {2**32 + 2}])"
    assert int(count(5)) == 5
    assert count(5) != 6
    with pytest.raises(TypeError):
        count(1) + 1


def test_trees_of_anything_compare():
    kinds = jax.tree.map(lambda leaf: leaf.dtype, count(3))
    assert kinds == jax.tree.map(lambda leaf: leaf.dtype, count(4))
    assert repr(kinds).startswith("Count(low=")


def test_the_rest():
    flags = counting.is_positive(count(jnp.array([0, 3], jnp.uint32)))
    assert flags.tolist() == [False, True]
    assert counting.is_positive(count(2**40))
    assert counting.to_float(count(3 * 2**32)) == 3 * 2.0**32
    assert np.asarray(counting.only_where(flags, count(2**40, shape=(2,)))).tolist() == [0, 2**40]
