"""Whole Linen models: which observers a model has, what they saw, and what they say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import linen as nn

from jqobs.linen._layers import ObservingLayer
from jqobs.observer import NotCalibratedError, Observer, State
from jqobs.qparams import QParams
from jqobs.reading import calculate_site_qparams, find_unseen


def calculate_qparams(model: nn.Module, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, QParams]:
    """Reads the grid of every observer in a model.

    A state holds no configuration, so the layers are found by tracing `model.apply(variables, *args, **kwargs)`
    abstractly: nothing is computed.

    Args:
      model: The model.
      variables: Its variables, with the collection "observers".
      *args: Arguments of the model, or `jax.ShapeDtypeStruct`s in their place.
      **kwargs: Keyword arguments of `model.apply`, such as `method`, `rngs`, or those of the model.

    Returns:
      `{path: QParams}` of the observers that saw data, the path of a layer joined by "/". Those that saw nothing are
      left out and named in one warning; placeholders and noops are left out. Under `nn.scan` the leaves of the
      `QParams` have one axis more, for the layers.

    Raises:
      NotCalibratedError: No observer saw anything.

    Example:
      >>> import jax, jax.numpy as jnp, jqobs
      >>> from flax import linen as nn
      >>> model = nn.Sequential([jqobs.linen.MinMaxObserver(), nn.Dense(4)])
      >>> x = jnp.ones((2, 3))
      >>> variables = model.init(jax.random.key(0), x)
      >>> _, observed = model.apply(variables, x, mutable=["observers"])
      >>> list(jqobs.linen.calculate_qparams(model, {**variables, **observed}, x))
      ['layers_0']
    """
    return calculate_site_qparams(find_observers(model, variables, *args, **kwargs))


def check_observed(model: nn.Module, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
    """Checks that every observer in a model has recorded something.

    Linen drops what a layer writes to a collection that is not passed through a lifted transformation, silently. So a
    model with `nn.scan` over layers needs `variable_axes={"observers": 0, ...}`, and this check finds it when it has
    not.

    Args:
      model: The model.
      variables: Its variables after calibration.
      *args: Arguments of the model, or `jax.ShapeDtypeStruct`s in their place.
      **kwargs: Keyword arguments of `model.apply`.

    Raises:
      NotCalibratedError: It names all the layers that recorded nothing.

    Example:
      >>> import jax, jax.numpy as jnp, jqobs
      >>> model, x = jqobs.linen.MinMaxObserver(), jnp.ones((2, 3))
      >>> jqobs.linen.check_observed(model, {}, x)
      Traceback (most recent call last):
      jqobs.observer.NotCalibratedError: these observers recorded nothing: the model itself. ...
    """
    unseen = find_unseen(find_observers(model, variables, *args, **kwargs))
    if unseen:
        raise NotCalibratedError(
            f"these observers recorded nothing: {', '.join(name or 'the model itself' for name in unseen)}. Was the "
            'model applied with mutable=["observers"], and was the returned collection kept? nn.scan and nn.vmap drop '
            'it unless they are given variable_axes={"observers": 0}'
        )


def find_observers(
    model: nn.Module, variables: Mapping[str, Any], *args: Any, **kwargs: Any
) -> dict[str, tuple[Observer, State]]:
    """The observer of every observing layer by its path, with its state in `variables`, or None where there is none."""
    found: dict[tuple[str, ...], Observer] = {}

    def note(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        if isinstance(context.module, ObservingLayer) and context.method_name == "__call__":
            found[context.module.path] = context.module.observer
        return call(*args, **kwargs)

    # Only arrays are made abstract: a flag or a name may decide what the model does.
    leaves, structure = jax.tree.flatten((variables, args, kwargs))
    arrays = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]

    def trace(values: list[Any]) -> Any:
        filled = dict(zip(arrays, values, strict=True))
        variables, args, kwargs = structure.unflatten(filled.get(i, leaf) for i, leaf in enumerate(leaves))
        with nn.intercept_methods(note):
            return model.apply(variables, *args, **kwargs, mutable=True)[0]

    jax.eval_shape(trace, [leaves[i] for i in arrays])
    return {"/".join(path): (observer, _state_at(variables, path)) for path, observer in found.items()}


def _state_at(variables: Mapping[str, Any], path: tuple[str, ...]) -> State:
    node: Any = variables.get("observers", {})
    for name in (*path, "state"):
        node = node.get(name, {})
    return node if node != {} else None
