"""Training an unedited NNX model with the grid in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jqobs.models.assignment import bind_channels
from jqobs.models.qconfig import QConfig, QConfigMapping, as_mapping
from jqobs.nnx._layers import FakeQuantize
from jqobs.tracing.products import output_axis_of_kernel

LAYERS = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv, nnx.ConvTranspose)
"""What is put on the grid; all of them pass their operands through `promote_dtype`."""


def prepare_qat(model: Any, mapping: QConfigMapping | QConfig) -> Any:
    """Puts the inputs and the weights of the layers of a model on the grid, without editing it.

    The layers are `Linear`, `LinearGeneral`, `Einsum`, `Conv` and `ConvTranspose`, wherever they are, inside attention
    too. Paths of parameters stay as they are, so that a float checkpoint loads; what `FakeQuantize` holds lies beside
    them, in `ObserverState` variables. Layers that `nnx.vmap` made a stack of, for `nnx.scan`, have a stack of these.

    Args:
      model: The model.
      mapping: Which layer has which `QConfig`, by its path, its class, or for all; None leaves a layer in float.

    Returns:
      A copy of the model under that mapping.

    Raises:
      ValueError: `mapping` is neither, or an activation whose per-channel observer has no `ch_axis`.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> from flax import nnx
      >>> model = nnx.Sequential(nnx.Linear(3, 8, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(8, 2, rngs=nnx.Rngs(1)))
      >>> qat = jqobs.nnx.prepare_qat(model, jqobs.get_default_qat_qconfig_mapping())
      >>> y = qat(jnp.ones((4, 3)))  # observes, and rounds
      >>> list(jqobs.nnx.calculate_qparams(qat))[:2]
      ['layers/0/promote_dtype/activation', 'layers/0/promote_dtype/weight']
    """
    mapping = as_mapping(mapping)
    model = nnx.clone(model)
    layers: list[tuple[Any, Any]] = [pair for pair in nnx.iter_graph(model) if isinstance(pair[1], LAYERS)]
    for keys, layer in layers:
        if isinstance(layer.promote_dtype, OnGrid):
            raise ValueError(f"model must be one that is not on the grid yet; its layer {'/'.join(map(str, keys))} is")
        path = "/".join(map(str, keys))
        qconfig = mapping.find(path, type(layer))
        if qconfig is not None:
            layer.promote_dtype = nnx.data(OnGrid(layer, qconfig, path))
    return model


class OnGrid(nnx.Module):
    """Stands for the `promote_dtype` of a layer, through which its operands go, and rounds them."""

    def __init__(self, layer: Any, qconfig: QConfig, path: str):
        kernel: jax.Array = layer.kernel.get_value()
        rank = _rank_of_kernel(layer)
        stack, shape = kernel.shape[: kernel.ndim - rank], kernel.shape[kernel.ndim - rank :]
        self.promote: Callable[..., Any] = layer.promote_dtype
        self.activation, self.weight = nnx.data(None), nnx.data(None)
        if qconfig.activation is not None:
            observer = bind_channels(qconfig.activation, f"{path}/activation", is_weight=False, ch_axis=None)
            self.activation = _stacked(FakeQuantize(observer), stack)
        if qconfig.weight is not None:
            axis = output_axis_of_kernel(
                rank,
                einsum_str=getattr(layer, "einsum_str", None),
                is_transposed=getattr(layer, "transpose_kernel", False),
            )
            observer = bind_channels(qconfig.weight, f"{path}/weight", is_weight=True, ch_axis=axis)
            self.weight = _stacked(FakeQuantize(observer, shape=shape), stack)

    def __call__(self, operands: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Returns the operands of the layer (input, kernel, bias) in one dtype, the first two on the grid."""
        x, kernel, *rest = self.promote(operands, *args, **kwargs)
        x = x if self.activation is None else self.activation(x)
        return x, kernel if self.weight is None else self.weight(kernel), *rest


def _stacked(module: FakeQuantize, stack: tuple[int, ...]) -> FakeQuantize:
    """The module with axes for the layers of a stack in front of all that it holds."""
    if stack:
        state = nnx.state(module)
        nnx.update(module, jax.tree.map(lambda leaf: jnp.array(jnp.broadcast_to(leaf, stack + leaf.shape)), state))
    return module


def _rank_of_kernel(layer: Any) -> int:
    """The rank of the parameter `kernel` of a single layer."""
    if isinstance(layer, nnx.LinearGeneral):
        axes = (layer.axis, layer.out_features, layer.batch_axis)
        return sum(1 if isinstance(axis, int) else len(axis) for axis in axes)
    return len(getattr(layer, "kernel_shape", "io"))
