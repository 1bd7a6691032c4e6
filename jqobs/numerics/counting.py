"""Integers that stay exact past 2**32, from two uint32 words: JAX has no 64-bit integers unless x64 is switched on."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


class Count(NamedTuple):
    """An array of exact counters, elementwise `high * 2**32 + low`.

    It is a pytree of two arrays, so it can be vmapped, scanned, donated, sharded and saved like any other. It reads as
    what it stands for: `int(count)` for a single one, `np.asarray(count)` (uint64) for many, `count == 3` by value.

    Attributes:
      low: `[*shape]` uint32, the lower 32 bits.
      high: `[*shape]` uint32, the upper 32 bits.

    Example:
      >>> from jqobs.numerics.counting import add, count
      >>> int(add(count(2**32 - 1), count(2)))
      4294967297
    """

    low: jax.Array
    high: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array of counters."""
        return self.low.shape

    def __int__(self) -> int:
        return int(self.high) << 32 | int(self.low)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # A new array either way.
        low, high = (np.asarray(word).astype(np.uint64) for word in self)
        return np.asarray(high << np.uint64(32) | low, dtype)

    def __eq__(self, other: object) -> Any:
        # As a tuple with its like, so that trees of anything compare; by value with a number or an array of numbers.
        return tuple.__eq__(self, other) if isinstance(other, tuple) else np.asarray(self) == other

    def __ne__(self, other: object) -> Any:
        return tuple.__ne__(self, other) if isinstance(other, tuple) else np.asarray(self) != other

    __hash__ = tuple.__hash__

    def __repr__(self) -> str:
        concrete = all(isinstance(word, jax.Array | np.ndarray) and not isinstance(word, Tracer) for word in self)
        return f"Count({np.asarray(self).tolist()})" if concrete else f"Count(low={self.low}, high={self.high})"


def count(value: Any = 0, shape: tuple[int, ...] = ()) -> Count:
    """Counters that all hold `value`: a Python integer, or a uint32 array counted by the caller.

    Example:
      >>> from jqobs.numerics.counting import count
      >>> count(7, shape=(2,))
      Count([7, 7])
    """
    if isinstance(value, int):
        low, high = value & 0xFFFFFFFF, value >> 32
        return Count(low=jnp.full(shape, low, jnp.uint32), high=jnp.full(shape, high, jnp.uint32))
    return Count(low=value, high=jnp.zeros_like(value))


def add(a: Count, b: Count) -> Count:
    """The exact elementwise sum; associative and commutative, modulo 2**64.

    Example:
      >>> from jqobs.numerics.counting import add, count
      >>> add(count(2**24), count(1))
      Count(16777217)
    """
    low = a.low + b.low
    carry = (low < a.low).astype(jnp.uint32)
    return Count(low=low, high=a.high + b.high + carry)


def is_positive(a: Count) -> jax.Array:
    """Whether each counter is above zero, as booleans.

    Example:
      >>> from jqobs.numerics.counting import count, is_positive
      >>> bool(is_positive(count(2**32)))
      True
    """
    return (a.low | a.high) != 0


def to_float(a: Count) -> jax.Array:
    """Each counter rounded to float32.

    Example:
      >>> from jqobs.numerics.counting import count, to_float
      >>> to_float(count(2**33)).item() == 2.0**33
      True
    """
    return a.high.astype(jnp.float32) * 2.0**32 + a.low.astype(jnp.float32)


def only_where(flag: jax.Array, a: Count) -> Count:
    """The counters where `flag` holds, and 0 elsewhere.

    Example:
      >>> import jax.numpy as jnp
      >>> from jqobs.numerics.counting import count, only_where
      >>> only_where(jnp.array([True, False]), count(3, shape=(2,)))
      Count([3, 0])
    """
    return jax.tree.map(lambda word: jnp.where(flag, word, jnp.zeros_like(word)), a)


def count_true(flags: jax.Array, axes: tuple[int, ...]) -> Count:
    """How many of the flags along some axes are set, exact past 2**32.

    Example:
      >>> import jax.numpy as jnp
      >>> from jqobs.numerics.counting import count_true
      >>> count_true(jnp.array([[True, False], [True, True]]), (1,))
      Count([1, 2])
    """
    if math.prod(flags.shape[axis] for axis in axes) < 2**32:
        return count(jnp.sum(flags, axes, dtype=jnp.uint32))
    rows = jnp.sum(flags, axes[-1], dtype=jnp.uint32)  # And their sum in two digits, for up to 2**16 rows.
    low, high = (jnp.sum(digit, axes[:-1], dtype=jnp.uint32) for digit in (rows & 0xFFFF, rows >> 16))
    return add(count(low), Count(low=high << 16, high=high >> 16))


def tally(index: jax.Array, where: jax.Array, size: int) -> Count:
    """How often each of `0..size-1` stands in `index`, at the places that `where` marks.

    The index keeps the shape of the data: flattening it, or sorting, would gather data that is spread over devices.

    Example:
      >>> import jax.numpy as jnp
      >>> from jqobs.numerics.counting import tally
      >>> tally(jnp.array([2, 0, 2]), jnp.array([True, True, True]), 3)
      Count([1, 0, 2])
    """
    zeros = jnp.zeros(size, jnp.uint32)
    return count(zeros.at[index].add(where.astype(jnp.uint32), mode="promise_in_bounds"))


def tally_counts(index: jax.Array, counts: Count, size: int) -> Count:
    """Sums of counters by index, exact: for up to 2**16 of them.

    Example:
      >>> import jax.numpy as jnp
      >>> from jqobs.numerics.counting import count, tally_counts
      >>> tally_counts(jnp.array([1, 0, 1]), count(2**40, shape=(3,)), 2) == [2**40, 2**41]
      array([ True,  True])
    """
    # In digits of 16 bits, of which 2**16 add up without a carry.
    digits = jnp.stack([word >> shift & 0xFFFF for word in counts for shift in (0, 16)], axis=-1)
    low0, low1, high0, high1 = jnp.moveaxis(jnp.zeros((size, 4), jnp.uint32).at[index].add(digits), -1, 0)
    shifted = Count(low=low1 << 16, high=(low1 >> 16) + high0 + (high1 << 16))
    return add(count(low0), shifted)


def split(a: Count, parts: int) -> Count:
    """Cuts each counter into `parts` (a power of two up to 16) that differ by at most 1: `[*shape, parts]`.

    Example:
      >>> from jqobs.numerics.counting import count, split
      >>> split(count(6), 4)
      Count([2, 1, 2, 1])
    """
    bits = parts.bit_length() - 1
    quotient = Count(low=a.low >> bits | a.high << (32 - bits), high=a.high >> bits)
    rest = (a.low & (parts - 1))[..., None]
    # The rest is laid evenly, a lone one in the middle: where a line of that slope passes a whole number.
    j = jnp.arange(parts, dtype=jnp.uint32).reshape([1] * a.low.ndim + [parts])
    extra = ((j + 1) * rest + parts // 2) // parts - (j * rest + parts // 2) // parts
    return add(jax.tree.map(lambda word: word[..., None], quotient), count(extra))
