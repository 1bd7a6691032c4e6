"""Whole NNX models: which observers a model has, what they saw, and what they say."""

from typing import Any

from flax import nnx

from jqobs.nnx._layers import ObservingModule
from jqobs.observer import NotCalibratedError, Observer, State
from jqobs.qparams import QParams
from jqobs.reading import calculate_site_qparams, find_unseen


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
      jqobs.observer.NotCalibratedError: these observers recorded nothing: the model itself. ...
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
        "/".join(map(str, path)): (node.observer, None if node.state is None else node.state.get_value())
        for path, node in nnx.iter_graph(model)
        if isinstance(node, ObservingModule)
    }
