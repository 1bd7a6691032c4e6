"""A carrier of configuration for tensors that are quantized on the fly: nothing is watched."""

from __future__ import annotations

from typing import NoReturn

from jqobs.formats.qtypes import Grid, QDtype, QScheme, per_tensor_affine, quint8
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
      is_dynamic: Whether the range is taken at run time. All five are read as `observer.recipe.get("is_dynamic")`.

    Returns:
      An observer without state.

    Raises:
      ValueError: Arguments of another type. Its `calculate_qparams` raises `RuntimeError`.

    Example:
      >>> import jqobs
      >>> observer = jqobs.placeholder(qdtype=jqobs.qint8, custom_op_name="embedding")
      >>> observer.recipe.get("custom_op_name"), observer.recipe.get("qdtype")
      ('embedding', qint8)

    References:
      `torch.ao.quantization.observer.PlaceholderObserver`.
    """
    Grid(qscheme, qdtype, eps)  # pyright: ignore[reportArgumentType]  (checks them; None stands for the default)

    def calculate_qparams() -> NoReturn:
        raise NoQParamsError(
            "placeholder watches no data: it only names the type of a tensor whose range is taken at run time, "
            "so it has no scale or zero point; use min_max or log_histogram for a static range"
        )

    return stateless(calculate_qparams)
