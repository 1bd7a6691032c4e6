"""A carrier of configuration for tensors that are quantized on the fly: nothing is watched."""

from __future__ import annotations

from typing import NoReturn

from jqobs.formats.qdtype import QDtype, quint8
from jqobs.formats.qscheme import QScheme, per_tensor_affine
from jqobs.formats.quant_spec import QuantSpec
from jqobs.observers.observer import NoQParamsError, Observer, stateless
from jqobs.recipe import factory


@factory
def placeholder(
    *,
    qdtype: QDtype = quint8,
    custom_op_name: str = "",
    qscheme: QScheme = per_tensor_affine,
    eps: float | None = None,
    is_dynamic: bool = False,
) -> Observer:
    """Watches nothing and names a type, for tensors whose range is taken at run time (dynamic quantization) or not at
    all.

    Args:
      qdtype: The type of the codes.
      custom_op_name: A name for whoever converts the model.
      qscheme: The scheme.
      eps: A floor under the scale; None for the grid's own.
      is_dynamic: Whether the range is taken at run time. With `custom_op_name` it is kept in
        `observer.recipe.arguments`; the type and the scheme are `observer.spec`.

    Returns:
      An observer without state.

    Raises:
      ValueError: Arguments of another type. Its `calculate_qparams` raises `RuntimeError`.

    Example:
      >>> import jqobs
      >>> observer = jqobs.placeholder(qdtype=jqobs.qint8, custom_op_name="embedding")
      >>> observer, observer.spec.qdtype
      (placeholder(qdtype=qint8, custom_op_name='embedding'), qint8)

    References:
      `torch.ao.quantization.observer.PlaceholderObserver`.
    """

    def calculate_qparams() -> NoReturn:
        raise NoQParamsError(
            "placeholder watches no data: it only names the type of a tensor whose range is taken at run time, "
            "so it has no scale or zero point; use min_max or log_histogram for a static range"
        )

    return stateless(calculate_qparams, QuantSpec(qdtype, qscheme, eps=eps))  # pyright: ignore[reportArgumentType]  (None: its own)
