"""Flat dictionaries of what the observers of a model hold: a NumPy array for every leaf, by its path."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def flatten_states(states: Mapping[str, Sequence[Any]]) -> dict[str, np.ndarray]:
    """Copies what each layer holds into one dictionary; nothing that happens to the layers later reaches it.

    Args:
      states: The NamedTuples that each layer holds, by its path; "" is the model itself.

    Returns:
      Arrays by `path/field`, in order.

    Example:
      >>> import jqobs
      >>> from jqobs.storage.state_dict import flatten_states
      >>> list(flatten_states({"conv": [jqobs.min_max().init(0.0)]}))[:3]
      ['conv/min_val', 'conv/max_val', 'conv/seen/low']
    """
    return {
        key: np.array(leaf)
        for path, held in states.items()
        for each in held
        for key, leaf in _leaves(path, jax.device_get(each))
    }


def fill_states(
    states: Mapping[str, Sequence[Any]], state_dict: Mapping[str, Any], unshaped: Mapping[str, int] | None = None
) -> dict[str, list[Any]]:
    """Reads such a dictionary back.

    Args:
      states: What each layer holds now, of which only the structure, shapes and dtypes count.
      state_dict: The dictionary.
      unshaped: The layers that have met no data, and the rank that their scale will have: their leaves have the shapes
        of a single channel, and get so many axes in front (but for flags, which are one for all channels). If nothing
        is said of one of their NamedTuples, it stays as it is.

    Returns:
      New NamedTuples by path, of arrays that are nobody else's; None for what stays as it is.

    Raises:
      ValueError: Keys that are missing, unexpected, or of another shape or dtype: all of them.

    Example:
      >>> import jqobs
      >>> from jqobs.storage.state_dict import fill_states
      >>> fill_states({"conv": [jqobs.noop().init(0.0)]}, {"cnov/min_val": 1.0})
      Traceback (most recent call last):
      ValueError: state_dict does not fit: unexpected cnov/min_val
    """
    unshaped = unshaped or {}
    given = {key: np.asarray(value) for key, value in state_dict.items()}

    def stays(path: str, each: Any) -> bool:
        return path in unshaped and not any(key in given for key, _ in _leaves(path, each))

    expected = {
        key: (path, unshaped.get(path), np.shape(leaf), np.dtype(jnp.asarray(leaf).dtype))
        for path, held in states.items()
        for each in held
        if not stays(path, each)
        for key, leaf in _leaves(path, each)
    }
    wrong = [f"missing {key}" for key in expected if key not in given]
    wrong += [f"unexpected {key}" for key in given if key not in expected]
    channels: dict[str, tuple[int, ...]] = {}
    for key, (path, rank, shape, dtype) in expected.items():
        if key in given:
            have, fits = given[key], given[key].shape == shape
            if rank is not None and dtype.kind != "b":
                front, own = have.shape[: have.ndim - len(shape)], have.shape[have.ndim - len(shape) :]
                of_layer = channels.setdefault(path, front)
                fits = own == shape and len(front) == rank and of_layer == front
            if not fits or not _holds(dtype, have):
                wrong.append(f"{key} of shape {have.shape} and dtype {have.dtype} for {shape} and {dtype}")
    if wrong:
        raise ValueError(f"state_dict does not fit: {'; '.join(wrong)}")

    def filled(path: str, each: Any) -> Any:
        if stays(path, each):
            return None
        leaves = [jnp.array(given[key], np.asarray(leaf).dtype, copy=True) for key, leaf in _leaves(path, each)]
        return jax.tree.unflatten(jax.tree.structure(each), leaves)

    return {path: [filled(path, each) for each in held] for path, held in states.items()}


def convert_torch_state_dict(
    state_dict: Mapping[str, Any], rename: Callable[[str], str] = lambda path: path
) -> dict[str, np.ndarray]:
    """Brings along a calibration that was made with `torch.ao.quantization`.

    Understood are the buffers of its observers (`min_val`, `max_val`, `histogram`) and of its `FakeQuantize` (`scale`,
    `zero_point`, the switches), in the state dictionary of an observer or of a whole model, of which all else is left.

    Args:
      state_dict: Its `state_dict()` with NumPy arrays for tensors: `{key: tensor.numpy() for ...}`.
      rename: From the path of a module there (with "/" for ".", and without `activation_post_process`) to that of the
        layer here.

    Returns:
      A dictionary as `load_observer_state_dict` takes it. PyTorch counts no values: one is said to have been
      seen wherever there is a range, or as many as the bins of a histogram hold.

    Example:
      >>> import numpy as np, jqobs
      >>> torch = {f"conv.activation_post_process.{end}_val": np.float32(end == "max") for end in ("min", "max")}
      >>> loaded = jqobs.convert_torch_state_dict(torch)
      >>> loaded["conv/max_val"].item(), loaded["conv/seen/low"].item()
      (1.0, 1)
    """
    layers: dict[str, dict[str, np.ndarray]] = {}
    for key, value in state_dict.items():
        *path, field = key.split(".")
        if field in {"min_val", "max_val", "histogram", "scale", "zero_point", *_SWITCHES}:
            name = rename("/".join(part for part in path if part != "activation_post_process"))
            layers.setdefault(name, {})[field] = np.asarray(value)
    converted: dict[str, np.ndarray] = {}
    for path, fields in layers.items():
        entries: dict[str, np.ndarray] = {}
        if {"min_val", "max_val"} <= fields.keys() and fields["min_val"].size:  # Empty where it has seen nothing.
            ends = {name: np.array(fields[name], np.float32) for name in ("min_val", "max_val")}
            seen = np.isfinite(ends["min_val"]) & np.isfinite(ends["max_val"])
            counts = {"seen": seen.astype(np.uint64), "nonfinite": np.zeros(seen.shape, np.uint64)}
            if "histogram" in fields:
                counts["histogram"] = np.rint(fields["histogram"]).astype(np.uint64)
                counts["seen"] = counts["histogram"].sum(-1)
            entries |= ends
            for name, count in counts.items():
                entries[f"{name}/low"] = (count & np.uint64(0xFFFFFFFF)).astype(np.uint32)
                entries[f"{name}/high"] = (count >> np.uint64(32)).astype(np.uint32)
        if "scale" in fields and any(name in fields for name in _SWITCHES):
            # A scale that rests on nothing is 1; one without an observer was given.
            known = "min_val" not in fields or bool(np.any(entries.get("seen/low", 0)))
            ends_shape = np.shape(entries.get("min_val", 0.0))
            entries["scale"] = np.array(fields["scale"], np.float32).reshape(ends_shape)
            entries["zero_point"] = np.array(fields["zero_point"], np.int32).reshape(ends_shape)
            entries["is_calibrated"] = np.array(known)
            for name in _SWITCHES:
                entries[name] = np.array(np.any(fields.get(name, True)))
        converted |= {f"{path}/{name}" if path else name: value for name, value in entries.items()}
    return converted


_SWITCHES = ("observer_enabled", "fake_quant_enabled")


def _leaves(path: str, state: Any) -> list[tuple[str, Any]]:
    """The leaves of a NamedTuple, by their fields behind the path of the layer."""
    named = jax.tree_util.tree_leaves_with_path(state)
    return [("/".join([*([path] if path else []), *(key.name for key in keys)]), leaf) for keys, leaf in named]


def _holds(dtype: np.dtype, values: np.ndarray) -> bool:
    """Whether a dtype holds values of that kind, and none of them wraps round."""
    kinds = "iu" if dtype.kind in "iu" else dtype.kind
    return values.dtype.kind in kinds and (dtype.kind == "f" or bool((values.astype(dtype) == values).all()))
