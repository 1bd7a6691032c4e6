"""Whole Linen models: which observers a model has, what they saw, and what they say."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from jqobs.layers.fake_quant import FakeQuantFlags, with_flags
from jqobs.layers.fake_quant import read_qparams as read_grid
from jqobs.linen._layers import ObservingLayer
from jqobs.observers.observer import NotCalibratedError, Observer, State
from jqobs.observers.reading import calculate_site_qparams, find_unseen
from jqobs.quantization.qparams import QParams
from jqobs.storage.state_dict import fill_states, flatten_states


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
      jqobs.observers.observer.NotCalibratedError: these observers recorded nothing: the model itself. ...
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
    for name in (*filter(None, path), "state"):
        node = node.get(name, {})
    return node if node != {} else None


def read_qparams(model: nn.Module, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Reads the grid of every `FakeQuantize` in a model for what it has seen.

    Only needed where a step does not do it itself, as with histograms, of which the grid is searched for.

    Args:
      model: The model.
      variables: Its variables.
      *args: Arguments of the model, or `jax.ShapeDtypeStruct`s in their place.
      **kwargs: Keyword arguments of `model.apply`.

    Returns:
      The variables with the new grids.

    Example:
      >>> import jax, jax.numpy as jnp, jqobs
      >>> model, x = jqobs.linen.FakeQuantize(jqobs.log_histogram(qdtype=jqobs.quint2)), jnp.array([0.25, 3.0])
      >>> _, variables = model.apply({}, x, mutable=["observers"])
      >>> model.apply(variables, x).tolist(), model.apply(jqobs.linen.read_qparams(model, variables, x), x).tolist()
      ([0.25, 3.0], [0.0, 3.0])
    """
    observers = {path: observer for path, (observer, _) in find_observers(model, variables, *args, **kwargs).items()}

    def with_new_qparams(path: str, name: str, value: Any) -> Any:
        if name != "cached_qparams" or path not in observers:  # This call may not reach all of the model.
            return value
        read = functools.partial(read_grid, observers[path])
        for _ in range(value.is_calibrated.ndim):  # Layers stacked by a scan.
            read = jax.vmap(read)
        return read(_state_at(variables, tuple(path.split("/"))))

    return _replaced(variables, with_new_qparams)


def enable_observer(variables: Mapping[str, Any], enabled: bool = True) -> dict[str, Any]:
    """The variables with every `FakeQuantize` observing, or not.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> _, variables = jqobs.linen.FakeQuantize(jqobs.min_max()).apply({}, jnp.ones(3), mutable=["observers"])
      >>> jqobs.linen.enable_observer(variables, False)["observers"]["flags"].observer_enabled.item()
      False
    """
    return _with_flags(variables, observer_enabled=enabled)


def disable_observer(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The variables with no `FakeQuantize` observing: every grid stays as it is."""
    return _with_flags(variables, observer_enabled=False)


def enable_fake_quant(variables: Mapping[str, Any], enabled: bool = True) -> dict[str, Any]:
    """The variables with every `FakeQuantize` rounding, or not."""
    return _with_flags(variables, fake_quant_enabled=enabled)


def disable_fake_quant(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The variables with no `FakeQuantize` rounding."""
    return _with_flags(variables, fake_quant_enabled=False)


def get_observer_state_dict(variables: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """All that the observers of a model hold, as a flat dictionary of NumPy copies by `path/field`.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> _, variables = jqobs.linen.MinMaxObserver().apply({}, jnp.array([-1.0, 2.0]), mutable=["observers"])
      >>> jqobs.linen.get_observer_state_dict(variables)["max_val"].item()
      2.0
    """
    return flatten_states({path: list(layer.values()) for path, layer in _held(variables).items()})


def load_observer_state_dict(variables: Mapping[str, Any], state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The variables with what such a dictionary holds.

    Args:
      variables: The variables of a model, that may have seen nothing: `model.init(...)`.
      state_dict: Made by `get_observer_state_dict`, or by `jqobs.convert_torch_state_dict`.

    Returns:
      New variables.

    Raises:
      ValueError: Keys that are missing, unexpected, or of another shape: all of them.

    Example:
      >>> import jax, jax.numpy as jnp, jqobs
      >>> model, x = jqobs.linen.PerChannelMinMaxObserver(ch_axis=1), jnp.ones((2, 3))
      >>> _, calibrated = model.apply({}, x, mutable=["observers"])
      >>> fresh = model.init(jax.random.key(0), x)
      >>> loaded = jqobs.linen.load_observer_state_dict(fresh, jqobs.linen.get_observer_state_dict(calibrated))
      >>> loaded["observers"]["state"].max_val.tolist()
      [1.0, 1.0, 1.0]
    """
    layer = _held(variables)
    filled = fill_states({path: list(each.values()) for path, each in layer.items()}, state_dict)
    new = {path: dict(zip(each, filled[path], strict=True)) for path, each in layer.items()}
    return _replaced(variables, lambda path, name, value: new[path][name])


def _held(variables: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The NamedTuples in the collection: by the path of the layer, and by the name of the variable."""
    layer: dict[str, dict[str, Any]] = {}

    def note(path: str, name: str, value: Any) -> Any:
        layer.setdefault(path, {})[name] = value
        return value

    _replaced(variables, note)
    return layer


def _with_flags(variables: Mapping[str, Any], **enabled: bool) -> dict[str, Any]:
    def set_flags(path: str, name: str, value: Any) -> Any:
        return with_flags(value, **enabled) if isinstance(value, FakeQuantFlags) else value

    return _replaced(variables, set_flags)


def _replaced(variables: Mapping[str, Any], replace: Callable[[str, str, Any], Any]) -> dict[str, Any]:
    """The variables with `replace(path, name, value)` for each NamedTuple in the collection."""

    def walk(node: Any, path: tuple[str, ...]) -> Any:
        if isinstance(node, Mapping):
            return {name: walk(each, (*path, name)) for name, each in node.items()}
        return replace("/".join(path[:-1]), path[-1], node)

    return {**variables, "observers": walk(variables.get("observers", {}), ())}
