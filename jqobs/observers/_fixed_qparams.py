"""A grid that is known beforehand, such as that of a sigmoid's output: data never changes it."""

from __future__ import annotations

import jax.numpy as jnp

from jqobs.formats.qdtype import QDtype, quint8
from jqobs.formats.qscheme import QScheme, per_tensor_affine
from jqobs.formats.quant_spec import QuantSpec, check_positive_normal
from jqobs.observers.observer import Observer, stateless
from jqobs.quantization.qparams import QParams
from jqobs.recipe import factory


@factory
def fixed_qparams(
    *,
    scale: float | tuple[float, ...],
    zero_point: int | tuple[int, ...],
    qscheme: QScheme = per_tensor_affine,
    qdtype: QDtype = quint8,
    ch_axis: int | None = None,
) -> Observer:
    """Returns the scale and the zero point it was given, before any data and after any data.

    The right choice for operations whose output range is known: sigmoid (`scale=1/256, zero_point=0`), tanh, softmax.

    Args:
      scale: A positive number, or a tuple of one per channel.
      zero_point: A code of `qdtype`, or a tuple of one per channel.
      qscheme: The scheme; a per-channel one for tuples.
      qdtype: The type of the codes.
      ch_axis: The channel axis of the data, for tuples.

    Returns:
      An observer without state.

    Raises:
      ValueError: A scale that is not positive, a zero point that is not a code, or arguments that contradict one
        another.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> sigmoid = jqobs.fixed_qparams(scale=1 / 256, zero_point=0)
      >>> qparams = sigmoid.calculate_qparams(sigmoid.init(jnp.zeros(3)))
      >>> jqobs.fake_quantize(jnp.array([0.0, 0.5, 1.0, -1.0, 2.0]), qparams).tolist()
      [0.0, 0.5, 0.99609375, 0.0, 0.99609375]

    References:
      `torch.ao.quantization.observer.FixedQParamsObserver`.
    """
    spec = QuantSpec(qdtype, qscheme, ch_axis)
    scales, zero_points = (value if isinstance(value, tuple) else (value,) for value in (scale, zero_point))
    if isinstance(scale, tuple) != isinstance(zero_point, tuple) or len(scales) != len(zero_points):
        raise ValueError(
            f"scale and zero_point must both be numbers, or tuples of one length; got {scale!r}, {zero_point!r}"
        )
    if isinstance(scale, tuple) != qscheme.is_per_channel:
        raise ValueError(
            f"scale must be a number for a per-tensor qscheme and a tuple for a per-channel one; got {scale!r}"
        )
    for value in scales:
        check_positive_normal("scale", value)
    for value in zero_points:
        if not hasattr(value, "__index__") or not qdtype.quant_min <= value <= qdtype.quant_max:
            raise ValueError(
                f"zero_point must be a code of {qdtype!r}, {qdtype.quant_min}..{qdtype.quant_max}; got {value!r}"
            )

    def calculate_qparams() -> QParams:
        return QParams(jnp.array(scale, jnp.float32), jnp.array(zero_point, jnp.int32), spec)

    return stateless(calculate_qparams, spec)
