"""States and grids on disk: a safetensors file whose header says what is in it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqobs._version import __version__
from jqobs.qparams import QParams
from jqobs.qtypes import QDtype, QScheme

SCHEMA = 1
"""What the header means; a reader refuses a newer one."""

_UNSIGNED = b"0" * 64  # Stands for the checksum while it is computed.
_CHECKSUM = re.compile(rb'\\"checksum\\": \\"([0-9a-f]{64})\\"')  # JSON inside JSON.

Node = dict[str, Any]
"""What the header says of a part of a tree: its kind, and its entries by name, or for an array its shape and dtype."""


class CheckpointError(ValueError):
    """A file that cannot be read: no checkpoint, damaged, of a newer library, or not of what it is to be read into."""


def save(path: str | os.PathLike[str], tree: Any) -> None:
    """Writes states or grids to a file, all or nothing (extra `checkpoint`).

    The file is written beside its place and moved there when it is on the disk: whoever is interrupted leaves the file
    that was there before. States are ordinary pytrees, so that Orbax (`ocp.StandardCheckpointer().save(path, states)`)
    and `flax.serialization` take them as they are; but neither stores what kind of state it is, and so cannot check it.

    Args:
      path: Where to.
      tree: A state, a `QParams`, an array, or a dict of these by string, nested as you like: the state of a
        calibration, or what its `calculate_qparams` returns.

    Raises:
      ValueError: Something else in the tree.
      OSError: The disk is full, the directory cannot be written to, ...
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
    tensors: dict[str, np.ndarray] = {}
    described = {"checksum": _UNSIGNED.decode(), "schema": SCHEMA, "version": __version__}
    described["tree"] = _describe(jax.device_get(tree), (), tensors)
    # One entry only: the order of several is another in every process, and equal trees should be equal files.
    unsigned = safetensors.save(tensors, {"jqobs": json.dumps(described)})
    _write(os.fspath(path), unsigned.replace(_UNSIGNED, _digest(unsigned), 1))


def load(path: str | os.PathLike[str], like: Any = None) -> Any:
    """Reads back what `save` wrote. Everything is checked first.

    Args:
      path: Where from.
      like: A tree with the structure that is expected, of arrays or of `jax.ShapeDtypeStruct`s, such as
        `calibration.init(*args)`. None for files of grids or plain arrays, which need no example.

    Returns:
      A tree like `like`, of new arrays.

    Raises:
      CheckpointError: The file is none of `save`, or damaged in any bit; it was written by a newer library; or it holds
        something else than `like`: all that is missing, unexpected, or of another kind, shape or dtype.
      OSError: It cannot be opened.
      ImportError: The extra `checkpoint` is not installed.

    Example:
      >>> import pathlib, tempfile, jqobs
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "grids.safetensors"
      >>> jqobs.save(path, {"up/lhs": jqobs.calculate_qparams(-1.0, 3.0, jqobs.per_tensor_affine, jqobs.quint8)})
      >>> int(jqobs.load(path)["up/lhs"].zero_point)
      64
    """
    path = os.fspath(path)
    tree, tensors = _read(path)
    if like is None:
        states = sorted({node["kind"] for _, node in _walk(tree) if node["kind"] not in ("dict", "array", "QParams")})
        if states:
            raise CheckpointError(f"like must be given to load {path}: it holds {', '.join(states)}")
        return _build(tree, tensors, None)
    expected = dict(_walk(_describe(like, (), {})))
    found = dict(_walk(tree))
    wrong = [f"missing {_name(at)}" for at in expected if at not in found]
    wrong += [f"unexpected {_name(at)}" for at in found if at not in expected]
    for at in expected.keys() & found.keys():
        have, want = (_summary(node) for node in (found[at], expected[at]))
        if have != want:
            wrong.append(f"{_name(at)} is {have} and not {want}")
    if wrong:
        raise CheckpointError(f"{path} does not hold what it is to be read into: {'; '.join(sorted(wrong))}")
    return _build(tree, tensors, like)


def _describe(tree: Any, at: tuple[str, ...], tensors: dict[str, np.ndarray]) -> Node:
    """What a tree is made of; its arrays go to `tensors`, each under a name that its place in the header tells."""
    if isinstance(tree, Mapping):
        if not all(isinstance(key, str) for key in tree):
            raise ValueError(f"tree must have strings for keys; {_name(at)} has {list(tree)}")
        parts, kind = dict(tree), {"kind": "dict"}
    elif isinstance(tree, QParams):
        qdtype = [tree.qdtype.name, tree.qdtype.quant_min, tree.qdtype.quant_max]
        static = {
            "qdtype": qdtype,
            "qscheme": tree.qscheme.value,
            "ch_axis": tree.ch_axis,
            "group_size": tree.group_size,
        }
        parts, kind = {"scale": tree.scale, "zero_point": tree.zero_point}, {"kind": "QParams", "static": static}
    elif hasattr(tree, "_fields"):
        parts, kind = tree._asdict(), {"kind": type(tree).__name__}
    else:
        shaped = tree if hasattr(tree, "shape") and hasattr(tree, "dtype") else np.asarray(tree)
        if np.dtype(shaped.dtype).kind not in "fiub":
            raise ValueError(f"tree must hold states, QParams, arrays and dicts; got {tree!r} at {_name(at)}")
        tensor = f"{len(tensors)}:{'/'.join(at)}"
        tensors[tensor] = np.zeros(0) if isinstance(shaped, jax.ShapeDtypeStruct) else np.array(shaped, order="C")
        return {"kind": "array", "tensor": tensor, "shape": list(shaped.shape), "dtype": str(np.dtype(shaped.dtype))}
    return {**kind, "entries": [[name, _describe(part, (*at, name), tensors)] for name, part in parts.items()]}


def _walk(node: Node, at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Node]]:
    yield at, node
    for name, part in node.get("entries", ()):
        yield from _walk(part, (*at, name))


def _build(node: Node, tensors: Mapping[str, np.ndarray], like: Any) -> Any:
    if node["kind"] == "array":
        return jnp.array(tensors[node["tensor"]], copy=True)
    if node["kind"] == "dict":
        return {name: _build(part, tensors, None if like is None else like[name]) for name, part in node["entries"]}
    if node["kind"] == "QParams":
        static, leaves = node["static"], {name: _build(part, tensors, None) for name, part in node["entries"]}
        qdtype, qscheme = QDtype(*static["qdtype"]), QScheme(static["qscheme"])
        return QParams(
            **leaves, qdtype=qdtype, qscheme=qscheme, ch_axis=static["ch_axis"], group_size=static["group_size"]
        )
    return type(like)(**{name: _build(part, tensors, getattr(like, name)) for name, part in node["entries"]})


def _summary(node: Node) -> str:
    if node["kind"] == "array":
        return f"an array {tuple(node['shape'])} of {node['dtype']}"
    return " ".join(map(str, [node["kind"], *node.get("static", {}).values()]))


def _name(at: tuple[str, ...]) -> str:
    return "/".join(at) or "the tree itself"


def _write(path: str, content: bytes) -> None:
    directory, name = os.path.split(path)
    beside = os.path.join(directory, f".{name}.tmp")
    try:
        with open(beside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        # The move itself is in the directory.
        handle = os.open(directory or ".", os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.remove(beside)
        if isinstance(error, OSError):
            raise type(error)(error.errno, f"cannot save: {error.strerror}", path) from error
        raise


def _read(path: str) -> tuple[Node, dict[str, np.ndarray]]:
    safetensors = _safetensors()
    if not stat.S_ISREG(os.stat(path).st_mode):  # To open a pipe would wait for a writer.
        raise CheckpointError(f"{path} is not a file")
    with open(path, "rb") as file:
        content = file.read()
    header = content[8 : 8 + int.from_bytes(content[:8], "little")]
    signed = _CHECKSUM.search(header)
    if signed is None:
        raise CheckpointError(f"{path} is no file of jqobs.save, or it is damaged: its header has no checksum")
    start, end = (8 + place for place in signed.span(1))
    if _digest(content[:start] + _UNSIGNED + content[end:]) != signed[1]:
        raise CheckpointError(f"{path} is damaged: its checksum does not fit")
    # What passed may still be the work of somebody else.
    try:
        tensors = safetensors.load(content)
        length = int.from_bytes(content[:8], "little")
        described = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["jqobs"])
        schema, tree = described["schema"], described["tree"]
    except Exception as error:
        raise CheckpointError(f"{path} is no file of jqobs.save: {type(error).__name__}: {error}") from error
    if not isinstance(schema, int) or schema > SCHEMA:
        raise CheckpointError(f"{path} has schema {schema!r}, and this is jqobs {__version__}, which reads {SCHEMA}")
    try:
        _check(tree, tensors)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} has a header that contradicts itself: {type(error).__name__}: {error}"
        ) from error
    return tree, tensors


def _check(node: Any, tensors: Mapping[str, np.ndarray]) -> None:
    """Holds what the header says against what is there."""
    if node["kind"] == "array":
        tensor = tensors[node["tensor"]]
        if list(tensor.shape) != node["shape"] or str(tensor.dtype) != node["dtype"]:
            raise ValueError(f"{node['tensor']} is {tensor.shape} {tensor.dtype}")
        return
    if node["kind"] == "QParams":
        static = node["static"]
        QDtype(*static["qdtype"])
        QScheme(static["qscheme"])
        if [name for name, _ in node["entries"]] != ["scale", "zero_point"]:
            raise ValueError("QParams must have a scale and a zero point")
        if any(type(static[name]) not in (int, type(None)) for name in ("ch_axis", "group_size")):
            raise TypeError("ch_axis and group_size must be integers")
    names = [name for name, _ in node["entries"]]
    if (
        not isinstance(node["kind"], str)
        or not all(isinstance(name, str) for name in names)
        or len({*names}) < len(names)
    ):
        raise TypeError("kinds and names must be strings, and names differ")
    for _, part in node["entries"]:
        _check(part, tensors)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError("saving and loading need safetensors: pip install 'jqobs[checkpoint]'") from error
    return safetensors.numpy
