"""Whole NNX models: which observers a model has, what they saw, and what they say."""

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
from flax import nnx

from jqobs.nnx._layers import FakeQuantize, ObservingModule
from jqobs.observers.observer import NotCalibratedError, Observer, State
from jqobs.observers.reading import calculate_site_qparams, find_unseen
from jqobs.quantization.qparams import QParams
from jqobs.storage.state_dict import fill_states, flatten_states

T = TypeVar("T")


def calculate_qparams(model: Any) -> dict[str, QParams]:
    """Reads the grid of every observer in a model, wherever it is stored.

    Args:
      model: An NNX module, which may be an observer itself.

    Returns:
      `{path: QParams}` of the observers that saw data, the path of a module joined by "/". Those that saw nothing are
      left out and named in one warning; placeholders and noops are left out.

    Raises:
      NotCalibratedError: No observer saw anything.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> from flax import nnx
      >>> model = nnx.Sequential(jqobs.nnx.MinMaxObserver(), nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
      >>> y = model(jnp.ones((2, 3)))
      >>> list(jqobs.nnx.calculate_qparams(model))
      ['layers/0']
    """
    return calculate_site_qparams(find_observers(model))


def check_observed(model: Any) -> None:
    """Checks that every observer in a model has recorded something.

    Raises:
      NotCalibratedError: It names all the observers that recorded nothing.

    Example:
      >>> import jqobs
      >>> jqobs.nnx.check_observed(jqobs.nnx.MinMaxObserver())
      Traceback (most recent call last):
      jqobs.observers.observer.NotCalibratedError: these observers recorded nothing: the model itself. ...
    """
    unseen = find_unseen(find_observers(model))
    if unseen:
        raise NotCalibratedError(
            f"these observers recorded nothing: {', '.join(name or 'the model itself' for name in unseen)}. Were they "
            "switched off by nnx.view(model, observing=False), or called under jax.jit instead of nnx.jit?"
        )


def find_observers(model: Any) -> dict[str, tuple[Observer, State]]:
    """Every observer in a model by its path, with its state or None."""
    return {
        path: (node.observer, None if node.state is None else node.state.get_value())
        for path, node in _find_by_path(model).items()
    }


def read_qparams(model: Any) -> None:
    """Reads the grid of every `FakeQuantize` in a model for what it has seen.

    Only needed where a step does not do it itself, as with histograms, of which the grid is searched for.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> model, x = jqobs.nnx.FakeQuantize(jqobs.log_histogram(qdtype=jqobs.quint2)), jnp.array([0.25, 3.0])
      >>> before = model(x)
      >>> jqobs.nnx.read_qparams(model)
      >>> before.tolist(), model(x).tolist()
      ([0.25, 3.0], [0.0, 3.0])
    """
    for node in _find(model, FakeQuantize):
        node.read_qparams()


def enable_observer(model: Any, enabled: bool = True) -> None:
    """Every `FakeQuantize` in a model observes, or not.

    Example:
      >>> import jqobs
      >>> model = jqobs.nnx.FakeQuantize(jqobs.min_max())
      >>> jqobs.nnx.enable_observer(model, False)
      >>> model.flags.get_value().observer_enabled.item()
      False
    """
    for node in _find(model, FakeQuantize):
        node.enable_observer(enabled)


def disable_observer(model: Any) -> None:
    """No `FakeQuantize` in a model observes: every grid stays as it is."""
    enable_observer(model, False)


def enable_fake_quant(model: Any, enabled: bool = True) -> None:
    """Every `FakeQuantize` in a model rounds, or not."""
    for node in _find(model, FakeQuantize):
        node.enable_fake_quant(enabled)


def disable_fake_quant(model: Any) -> None:
    """No `FakeQuantize` in a model rounds."""
    enable_fake_quant(model, False)


def get_observer_state_dict(model: Any) -> dict[str, np.ndarray]:
    """All that the observers of a model hold, as a flat dictionary of NumPy copies by `path/field`.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> model = jqobs.nnx.MinMaxObserver()
      >>> y = model(jnp.array([-1.0, 2.0]))
      >>> jqobs.nnx.get_observer_state_dict(model)["max_val"].item()
      2.0
    """
    return flatten_states({path: list(node.get_variables().values()) for path, node in _find_by_path(model).items()})


def load_observer_state_dict(model: Any, state_dict: Mapping[str, Any]) -> None:
    """Gives the observers of a model what such a dictionary holds.

    Args:
      model: A model, that may have seen nothing.
      state_dict: Made by `get_observer_state_dict`, or by `jqobs.convert_torch_state_dict`.

    Raises:
      ValueError: Keys that are missing, unexpected, or of another shape: all of them. The model is left as it was.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> calibrated, fresh = (jqobs.nnx.PerChannelMinMaxObserver(ch_axis=1) for _ in range(2))
      >>> y = calibrated(jnp.ones((2, 3)))
      >>> jqobs.nnx.load_observer_state_dict(fresh, jqobs.nnx.get_observer_state_dict(calibrated))
      >>> fresh.max_val.tolist()
      [1.0, 1.0, 1.0]
    """
    layers = _find_by_path(model)
    unshaped = {path: node.rank for path, node in layers.items() if node.state is None}
    held = {path: node.get_variables(of_one_channel=path in unshaped) for path, node in layers.items()}
    filled = fill_states({path: list(each.values()) for path, each in held.items()}, state_dict, unshaped)
    for path, node in layers.items():
        new = zip(held[path], filled[path], strict=True)
        node.set_variables({name: value for name, value in new if value is not None})


def _find_by_path(model: Any) -> dict[str, ObservingModule]:
    return {"/".join(map(str, path)): node for path, node in nnx.iter_graph(model) if isinstance(node, ObservingModule)}


def _find(model: Any, kind: type[T]) -> list[T]:
    return [node for _, node in nnx.iter_graph(model) if isinstance(node, kind)]
