"""Training an unedited Linen model with the grid in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn

from jqobs.linen._layers import FakeQuantize
from jqobs.models.assignment import bind_channels
from jqobs.models.qconfig import QConfig, QConfigMapping, as_mapping
from jqobs.tracing.products import output_axis_of_kernel

LAYERS = (nn.Dense, nn.DenseGeneral, nn.Einsum, nn.Conv, nn.ConvTranspose)
"""What is put on the grid; all of them pass their operands through `promote_dtype`."""


def prepare_qat(model: nn.Module, mapping: QConfigMapping | QConfig) -> Prepared:
    """Puts the inputs and the weights of the layers of a model on the grid, without editing it.

    The layers are `Dense`, `DenseGeneral`, `Einsum`, `Conv` and `ConvTranspose`, wherever they are, inside attention
    too. Paths of parameters stay as they are, so that a float checkpoint loads; what `FakeQuantize` holds lies beside
    them in the collection "observers", under `activation` and `weight`. Inside `nn.scan` the model has to pass that
    collection on, with `variable_axes={"observers": 0, ...}`.

    Args:
      model: The model.
      mapping: Which layer has which `QConfig`, by its path, its class, or for all; None leaves a layer in float.

    Returns:
      The model under that mapping: it has the methods of the model (`init`, `apply`, ...), and the same signatures.

    Raises:
      ValueError: `mapping` is neither; when it is applied, an activation whose per-channel observer has no `ch_axis`.

    Example:
      >>> import jax, jax.numpy as jnp, jqobs
      >>> from flax import linen as nn
      >>> model = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(2)])
      >>> qat, x = jqobs.linen.prepare_qat(model, jqobs.get_default_qat_qconfig_mapping()), jnp.ones((4, 3))
      >>> variables = qat.init(jax.random.key(0), x)
      >>> list(variables["observers"]["layers_0"])
      ['activation', 'weight']
      >>> y, updated = qat.apply(variables, x, mutable=["observers"])  # one step: observes, and rounds
    """
    if isinstance(model, Prepared):
        raise ValueError("model must be one that is not on the grid yet; got one that prepare_qat has made")
    return Prepared(model, as_mapping(mapping))


class Prepared:
    """A Linen model whose layers are on the grid; made by `prepare_qat`.

    Attributes:
      model: The model.
      mapping: The mapping.
    """

    def __init__(self, model: nn.Module, mapping: QConfigMapping) -> None:
        self.model = model
        self.mapping = mapping
        self.members: dict[str, Any] = {}  # One each, so that `qat.apply` is always the same function.

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("model", "mapping", "members"):
            raise AttributeError(name)
        if not callable(getattr(self.model, name)):
            return getattr(self.model, name)
        if name not in self.members:
            self.members[name] = self._intercepted(name)
        return self.members[name]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls a model that is bound: `qat.bind(variables)(x)`."""
        return self._intercepted("__call__")(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model, "mapping": self.mapping, "members": {}}

    def _intercepted(self, name: str) -> Callable[..., Any]:
        member = getattr(self.model, name)

        @functools.wraps(member)
        def intercepted(*args: Any, **kwargs: Any) -> Any:
            method: Any = kwargs.get("method")
            kwargs |= {"method": method.of_prepared} if hasattr(method, "of_prepared") else {}  # method=qat.encode
            # Inside whatever jits this call: a compiled function would not see the interceptor.
            with nn.intercept_methods(self._on_grid):
                result = member(*args, **kwargs)
            return Prepared(result, self.mapping) if isinstance(result, nn.Module) else result

        setattr(intercepted, "of_prepared", name)  # noqa: B010 (functions have no such attribute, says the checker)
        return intercepted

    def _on_grid(self, call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        layer: Any = context.module
        if not isinstance(layer, LAYERS) or context.method_name != "__call__":
            return call(*args, **kwargs)
        path = "/".join(layer.path)
        qconfig = self.mapping.find(path, type(layer))
        if qconfig is None:
            return call(*args, **kwargs)
        promote = layer.promote_dtype
        if hasattr(promote, "is_on_grid"):  # A subclass calls the method of its base.
            return call(*args, **kwargs)

        def promote_to_grid(*operands: Any, **options: Any) -> list[Any]:
            promoted: Any = promote(*operands, **options)
            x, kernel, *rest = promoted
            return [*_round(qconfig, layer, path, x, kernel, _output_axis(layer, kernel, args, kwargs)), *rest]

        setattr(promote_to_grid, "is_on_grid", True)  # noqa: B010 (functions have no such attribute, says the checker)
        object.__setattr__(layer, "promote_dtype", promote_to_grid)
        try:
            return call(*args, **kwargs)
        finally:
            object.__setattr__(layer, "promote_dtype", promote)


def _round(qconfig: QConfig, layer: Any, path: str, x: jax.Array, kernel: jax.Array, axis: int) -> list[jax.Array]:
    operands = [("activation", x, qconfig.activation), ("weight", kernel, qconfig.weight)]
    rounded = []
    for name, operand, observer in operands:
        if observer is not None:
            where = f"{path}/{name}" if path else name
            observer = bind_channels(observer, where, is_weight=name == "weight", ch_axis=axis)
            is_taken = hasattr(layer, name) or layer.has_variable("params", name)  # By a class of the user's.
            operand = FakeQuantize(observer, name=f"{name}_grid" if is_taken else name)(operand)
        rounded.append(operand)
    return rounded


def _output_axis(layer: Any, kernel: jax.Array, args: Any, kwargs: Any) -> int:
    given = kwargs.get("einsum_str", args[1] if len(args) > 1 and isinstance(layer, nn.Einsum) else None)
    return output_axis_of_kernel(
        kernel.ndim,
        einsum_str=given or getattr(layer, "einsum_str", None),
        is_transposed=getattr(layer, "transpose_kernel", False),
    )
