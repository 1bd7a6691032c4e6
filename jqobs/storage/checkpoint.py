"""States and scales on disk: a safetensors file whose header says what is in it."""

from __future__ import annotations

import json
import os
from typing import Any

import jax
import numpy as np

from jqobs._version import __version__
from jqobs.storage.files import UNSIGNED, CheckpointError, header_of, read_signed, write_signed
from jqobs.storage.trees import Node, build, check, compare, describe

SCHEMA = 2
"""What the header means; a reader refuses any other."""


def save(path: str | os.PathLike[str], tree: Any) -> None:
    """Writes states or scales to a file, all or nothing (extra `checkpoint`).

    The file is written beside its place and moved there when it is on the disk: whoever is interrupted leaves the file
    that was there before. States are ordinary pytrees, so that Orbax (`ocp.StandardCheckpointer().save(path, states)`)
    and `flax.serialization` take them as they are; but neither stores what kind of state it is, and so cannot check it.

    Args:
      path: Where to.
      tree: The state of a model or of an observer, a `QParams`, an array, or a dict of these by string, nested up to
        100 deep.

    Raises:
      ValueError: Something else in the tree: a list, text, numbers of 64 bits that JAX would not give back, ...
      OSError: The disk is full, the directory cannot be written to, the path is a pipe or a device, ...
      ImportError: The extra `checkpoint` is not installed.

    Example:
      >>> import pathlib, tempfile, jax.numpy as jnp, jqobs
      >>> observer, x = jqobs.min_max(), jnp.array([-1.0, 2.0])
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "state.safetensors"
      >>> jqobs.save(path, observer.update(observer.init(x), x))
      >>> jqobs.load(path, observer.init(x)).max_val.item()
      2.0
      >>> from flax import serialization
      >>> message = serialization.to_bytes(observer.update(observer.init(x), x))
      >>> serialization.from_bytes(observer.init(x), message).max_val.item()
      2.0
    """
    safetensors = _safetensors()
    leaves: dict[str, Any] = {}
    header = {"checksum": UNSIGNED.decode(), "schema": SCHEMA, "version": __version__}
    header["tree"] = describe(tree, (), leaves)
    # In the order of bytes of this machine, and of rows, whatever it was before.
    tensors = {name: np.array(leaf, leaf.dtype.name, order="C") for name, leaf in jax.device_get(leaves).items()}
    # One entry only: the order of several is another in every process, and equal trees should be equal files.
    write_signed(os.fspath(path), safetensors.save(tensors, {"jqobs": json.dumps(header)}))


def load(path: str | os.PathLike[str], like: Any = None) -> Any:
    """Reads back what `save` wrote. Everything is checked first.

    Args:
      path: Where from.
      like: A tree with the structure that is expected, of arrays or of `jax.ShapeDtypeStruct`s, such as
        `observer.init(x)`. None for what says itself what it is: `QParams`, arrays, and the state of a model whose
        observers are all of this library.

    Returns:
      A tree like `like`, of new arrays.

    Raises:
      CheckpointError: The file is none of `save`, or damaged in any bit; it was written by a newer library; or it holds
        something else than `like`: all that is missing, unexpected, or of another kind, shape or dtype.
      OSError: It cannot be opened.
      ImportError: The extra `checkpoint` is not installed.

    Example:
      >>> import pathlib, tempfile, jqobs
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "qparams.safetensors"
      >>> jqobs.save(path, {"up/lhs": jqobs.calculate_qparams(-1.0, 3.0, jqobs.QuantSpec(jqobs.quint8))})
      >>> int(jqobs.load(path)["up/lhs"].zero_point)
      64
    """
    path = os.fspath(path)
    node, tensors = _read(path)
    if like is not None:
        wrong = compare(node, like)
        if wrong:
            raise CheckpointError(f"{path} does not hold what it is to be read into: {'; '.join(sorted(wrong))}")
        return build(node, tensors, like)
    try:
        return build(node, tensors)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _read(path: str) -> tuple[Node, dict[str, np.ndarray]]:
    safetensors = _safetensors()
    content = read_signed(path)
    # What passed may still be the work of somebody else.
    try:
        header = json.loads(header_of(content)["__metadata__"]["jqobs"])
        schema = header["schema"]
    except Exception as error:
        raise CheckpointError(f"{path} is no file of jqobs.save: {type(error).__name__}: {error}") from error
    if type(schema) is not int or schema != SCHEMA:
        raise CheckpointError(f"{path} has schema {schema!r}, and this is jqobs {__version__}, which reads {SCHEMA}")
    try:
        tree, tensors = header["tree"], safetensors.load(content)
        unclaimed = dict(tensors)
        check(tree, unclaimed)
        if unclaimed:
            raise ValueError(f"nothing is said of {', '.join(sorted(unclaimed))}")
    except Exception as error:
        raise CheckpointError(
            f"{path} has a header that contradicts itself: {type(error).__name__}: {error}"
        ) from error
    return tree, tensors


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError("saving and loading need safetensors: pip install 'jqobs[checkpoint]'") from error
    return safetensors.numpy
