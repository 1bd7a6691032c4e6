"""The one door through which arrays come in: what is taken, and who owns it afterwards."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def as_array(x: Any, name: str = "x") -> Any:
    """An array of values to compute on in float32: one of JAX, or a copy in NumPy of whatever NumPy can read.

    Of what the host owns a copy is taken, since a loader may fill its buffer again while a device still reads it. Host
    values of 64 bits become float32 here: without x64, JAX would wrap such integers round in place of rounding them.

    Args:
      x: An array of JAX, which is returned as it is; or an array, a list, a number, a memoryview, a tensor of torch on
        the CPU, a column of pandas.
      name: What it is called in errors.

    Raises:
      ValueError: NumPy cannot read it.

    Example:
      >>> from jqobs.numerics.inputs import as_array
      >>> as_array([2**40]).tolist()
      [1099511627776.0]
    """
    x = owned(x, name)
    if isinstance(x, np.ndarray) and x.dtype.kind in "iuf" and x.dtype.itemsize == 8:
        with np.errstate(over="ignore"):  # Finiteness is judged after the cast.
            return x.astype(np.float32)
    return x


def as_mask(mask: Any) -> Any:
    """A mask: booleans, or integers of which 0 is false.

    Raises:
      ValueError: Something else, such as floats.

    Example:
      >>> from jqobs.numerics.inputs import as_mask
      >>> as_mask([2**32, 0]).tolist()
      [True, False]
    """
    mask = owned(mask, "mask")
    if not (jnp.issubdtype(mask.dtype, jnp.integer) or mask.dtype == jnp.bool_):
        raise ValueError(f"mask must be boolean (or 0 and 1); got {mask.dtype}")
    return mask.astype(bool)


def owned(x: Any, name: str = "x") -> Any:
    """An array of JAX as it is, and a copy of what the host owns, whatever its dtype.

    Example:
      >>> import numpy as np
      >>> from jqobs.numerics.inputs import owned
      >>> x = np.ones(3)
      >>> np.shares_memory(owned(x), x)
      False
    """
    return x if isinstance(x, jax.Array) else _read(x, name, copy=True)


def described(x: Any, name: str = "x") -> Any:
    """Something with the shape and the dtype of `x`, of which nothing is copied; a `jax.ShapeDtypeStruct` will do.

    Example:
      >>> from jqobs.numerics.inputs import described
      >>> described([[1, 2]]).shape
      (1, 2)
    """
    return x if isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct) else _read(x, name, copy=False)


def is_array(x: Any) -> bool:
    """Whether a leaf of a tree is an array, of whatever library, and no number, flag, text or object.

    Example:
      >>> import numpy as np
      >>> from jqobs.numerics.inputs import is_array
      >>> is_array(np.ones(3)), is_array(memoryview(b"abc")), is_array(1.0), is_array("abc")
      (True, True, False, False)
    """
    return (hasattr(x, "shape") and hasattr(x, "dtype")) or isinstance(x, memoryview) or hasattr(x, "__array__")


def _read(x: Any, name: str, *, copy: bool) -> Any:
    if hasattr(x, "__jax_array__"):
        return x.__jax_array__()
    try:
        return np.array(x, copy=copy or None)
    except Exception as error:
        raise ValueError(
            f"{name} must be an array, or what NumPy can read; of a {type(x).__name__} it says: {error}. Hand over an "
            "array, such as tensor.detach().cpu().float().numpy() for a tensor of torch"
        ) from error
