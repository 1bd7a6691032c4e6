"""Which axis of an operand of a product holds the output features: that of the channels of a weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def _last_free(rank: int, *bound: Iterable[int]) -> int | None:
    free = set(range(rank)).difference(*bound)
    return max(free) if free else None


def _dot_axis(params: Any, side: str, rank: int) -> int | None:
    contracted, batch = params["dimension_numbers"]
    which = side == "rhs"
    return _last_free(rank, contracted[which], batch[which])


def _ragged_axis(params: Any, side: str, rank: int) -> int | None:
    numbers = params["ragged_dot_dimension_numbers"]
    groups = numbers.rhs_group_dimensions if side == "rhs" else ()
    (contracted, batch), which = numbers.dot_dimension_numbers, side == "rhs"
    return _last_free(rank, contracted[which], batch[which], groups)


def _conv_axis(params: Any, side: str, rank: int) -> int | None:
    # Grouped and transposed ones too: the numbers say what each axis is to the operation.
    numbers = params["dimension_numbers"]
    return numbers.rhs_spec[0] if side == "rhs" else numbers.lhs_spec[0]


OUTPUT_AXES: dict[str, Callable[[Any, str, int], int | None]] = {
    "dot_general": _dot_axis,
    "ragged_dot_general": _ragged_axis,
    "conv_general_dilated": _conv_axis,
}
"""The products by primitive, as `(parameters, side, rank) -> axis`; None where every axis is summed over."""


def is_opaque_product(primitive: str) -> bool:
    """Whether a primitive multiplies operands that nobody can watch, such as sparse ones.

    Example:
      >>> from jqobs.tracing.products import is_opaque_product
      >>> is_opaque_product("bcoo_dot_general"), is_opaque_product("dot_general"), is_opaque_product("add")
      (True, False, False)
    """
    return primitive not in OUTPUT_AXES and any(part in primitive for part in _PARTS_OF_PRODUCTS)


_PARTS_OF_PRODUCTS = ("dot_general", "conv_general", "matmul", "matmat", "matvec", "dot_product_attention")
"""As in `bcoo_dot_general`, `bcsr_dot_general`, `coo_matvec`, `csr_matmat`, `scaled_matmul`."""


def output_axis_of_kernel(rank: int, *, einsum_str: str | None = None, is_transposed: bool = False) -> int:
    """The axis of the output features in the parameter `kernel` of a Flax layer.

    Args:
      rank: The rank of the kernel.
      einsum_str: The einsum of the layer, if it is one: the last axis of its second operand that the first has not.
      is_transposed: Whether it is the kernel of a convolution with input and output exchanged.

    Example:
      >>> from jqobs.tracing.products import output_axis_of_kernel
      >>> output_axis_of_kernel(4), output_axis_of_kernel(4, is_transposed=True)
      (3, 2)
      >>> output_axis_of_kernel(2, einsum_str="btd,dk->btk"), output_axis_of_kernel(2, einsum_str="...d,kd->...k")
      (1, 0)
    """
    if einsum_str is None:
        return rank - 2 if is_transposed else rank - 1
    first, second = einsum_str.replace(" ", "").split("->")[0].split(",")
    own = [rank - len(second) + place for place, letter in enumerate(second) if letter not in first]
    return own[-1] if own else rank - 1
