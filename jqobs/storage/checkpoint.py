"""States and grids on disk: a safetensors file whose header says what is in it."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqobs._version import __version__
from jqobs.formats.granularity import Granularity
from jqobs.formats.qtypes import QDtype, QScheme
from jqobs.quantization.qparams import QParams

SCHEMA = 1
"""What the header means; a reader refuses any other."""

DTYPES = {np.dtype(code).name for code in "?efdbBhHiIqQ"}
"""What an array may hold: booleans, floats and integers of up to 64 bits."""

DEEPEST = 100
"""How far a tree may be nested: a header that never ends must not exhaust the stack."""

_LONGEST_HEADER = 100_000_000  # That of safetensors.
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
      tree: A state, a `QParams`, an array, or a dict of these by string, nested up to 100 deep: the state of a
        calibration, or what its `calculate_qparams` returns.

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
    described = {"checksum": _UNSIGNED.decode(), "schema": SCHEMA, "version": __version__}
    described["tree"] = _describe(tree, (), leaves)
    # In the order of bytes of this machine, and of rows, whatever it was before.
    tensors = {name: np.array(leaf, leaf.dtype.name, order="C") for name, leaf in jax.device_get(leaves).items()}
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
    found = dict(_walk(tree))
    if like is None:
        states = sorted({node["kind"] for node in found.values()} - {"dict", "array", "QParams"})
        if states:
            raise CheckpointError(f"like must be given to load {path}: it holds {', '.join(states)}")
        wide = sorted({tensor.dtype.name for tensor in tensors.values() if not _fits(tensor.dtype.name)})
        if wide:
            raise CheckpointError(f"{path} holds {', '.join(wide)}, for which JAX needs jax_enable_x64")
        return _build(tree, tensors)
    expected = dict(_walk(_describe(like, (), {})))
    wrong = [f"missing {_name(at)}" for at in expected if at not in found]
    wrong += [f"unexpected {_name(at)}" for at in found if at not in expected]
    for at in expected.keys() & found.keys():
        have, want = (_summary(node) for node in (found[at], expected[at]))
        if have != want:
            wrong.append(f"{_name(at)} is {have} and not {want}")
    if wrong:
        raise CheckpointError(f"{path} does not hold what it is to be read into: {'; '.join(sorted(wrong))}")
    return jax.tree_util.tree_map_with_path(lambda keys, leaf: _build(found[_place(keys)], tensors), like)


def _describe(tree: Any, at: tuple[str, ...], leaves: dict[str, Any]) -> Node:
    """What a tree is made of; its arrays go to `leaves`, each under a name that its place in the header tells."""
    if len(at) > DEEPEST:
        raise ValueError(f"tree must be nested at most {DEEPEST} deep; {_name(at)} is deeper")
    if hasattr(tree, "_fields"):
        parts, kind = tree._asdict(), {"kind": type(tree).__name__}
    elif isinstance(tree, Mapping) and not jax.tree_util.all_leaves([tree]):
        if not all(isinstance(key, str) for key in tree):
            raise ValueError(f"tree must have strings for keys; {_name(at)} has {list(tree)}")
        parts, kind = {key: tree[key] for key in sorted(tree)}, {"kind": "dict"}
    elif isinstance(tree, QParams):
        parts, kind = {"scale": tree.scale, "zero_point": tree.zero_point}, {"kind": "QParams", "static": _static(tree)}
    else:
        leaf = _array(tree, at)
        tensor = f"{len(leaves)}:{'/'.join(at)}"
        leaves[tensor] = leaf
        return {"kind": "array", "tensor": tensor, "shape": list(leaf.shape), "dtype": leaf.dtype.name}
    return {**kind, "entries": [[name, _describe(part, (*at, name), leaves)] for name, part in parts.items()]}


def _array(leaf: Any, at: tuple[str, ...]) -> Any:
    """A leaf, if it comes back as it is; its values are not looked at. A Python number is what JAX makes of it."""
    if type(leaf) in (bool, int, float):
        with contextlib.suppress(OverflowError):
            leaf = jnp.asarray(leaf)
    name = getattr(getattr(leaf, "dtype", None), "name", None)
    if name not in DTYPES or not hasattr(leaf, "shape"):
        raise ValueError(f"tree must hold states, QParams, arrays and dicts; got {leaf!r} at {_name(at)}")
    if not _fits(name):
        raise ValueError(f"tree must hold what JAX does; {name} at {_name(at)} needs a cast, or jax_enable_x64")
    return leaf


def _fits(dtype: str) -> bool:
    """Whether JAX, as it is configured, holds such numbers without cutting them."""
    return jax.dtypes.canonicalize_dtype(dtype).name == dtype


def _static(grid: QParams) -> dict[str, Any]:
    """What the header says of a grid beside its arrays."""
    granularity = Granularity(grid.qscheme, grid.ch_axis, grid.group_size)
    return {
        "qdtype": [grid.qdtype.name, grid.qdtype.quant_min, grid.qdtype.quant_max],
        "qscheme": grid.qscheme.value,
        "ch_axis": granularity.ch_axis,
        "group_size": granularity.group_size,
    }


def _grid(static: Mapping[str, Any], scale: Any, zero_point: Any) -> QParams:
    """And back."""
    qdtype, qscheme = QDtype(*static["qdtype"]), QScheme(static["qscheme"])
    return QParams(scale, zero_point, qdtype, qscheme, static["ch_axis"], static["group_size"])


def _walk(node: Node, at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Node]]:
    yield at, node
    for name, part in node.get("entries", ()):
        yield from _walk(part, (*at, name))


def _build(node: Node, tensors: Mapping[str, np.ndarray]) -> Any:
    if node["kind"] == "array":
        return jnp.array(tensors[node["tensor"]], copy=True)
    parts = {name: _build(part, tensors) for name, part in node["entries"]}
    return _grid(node["static"], **parts) if node["kind"] == "QParams" else parts


def _summary(node: Node) -> str:
    if node["kind"] == "array":
        return f"an array {tuple(node['shape'])} of {node['dtype']}"
    return " ".join(map(str, [node["kind"], *node.get("static", {}).values()]))


def _name(at: tuple[str, ...]) -> str:
    return "/".join(at) or "the tree itself"


def _place(keys: tuple[Any, ...]) -> tuple[str, ...]:
    """The place that JAX calls by these keys."""
    return tuple(key.key if hasattr(key, "key") else key.name for key in keys)


def _write(path: str, content: bytes) -> None:
    directory = os.path.dirname(path)
    # A name that nobody else writes to, be it another process of the same run.
    beside = os.path.join(directory, f".jqobs-{secrets.token_hex(8)}.tmp")
    try:
        if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
            raise FileExistsError(errno.EEXIST, "It is a pipe or a device")
        with open(beside, "xb") as file:
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
    content, start, end = _content(path)
    if _digest(content[:start] + _UNSIGNED + content[end:]) != content[start:end]:
        raise CheckpointError(f"{path} is damaged: its checksum does not fit")
    # What passed may still be the work of somebody else.
    try:
        described = json.loads(_header(content)["__metadata__"]["jqobs"])
        schema = described["schema"]
    except Exception as error:
        raise CheckpointError(f"{path} is no file of jqobs.save: {type(error).__name__}: {error}") from error
    if type(schema) is not int or schema != SCHEMA:
        raise CheckpointError(f"{path} has schema {schema!r}, and this is jqobs {__version__}, which reads {SCHEMA}")
    try:
        tree, tensors = described["tree"], safetensors.load(content)
        unclaimed = dict(tensors)
        _check(tree, unclaimed)
        if unclaimed:
            raise ValueError(f"nothing is said of {', '.join(sorted(unclaimed))}")
    except Exception as error:
        raise CheckpointError(
            f"{path} has a header that contradicts itself: {type(error).__name__}: {error}"
        ) from error
    return tree, tensors


def _content(path: str) -> tuple[bytes, int, int]:
    """A file, and where its checksum is. Nothing that is not as long as its header says is read beyond that."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # To open a pipe would wait for a writer.
        raise CheckpointError(f"{path} is not a file")
    with open(path, "rb") as file:
        size, content = os.fstat(file.fileno()).st_size, file.read(8)
        length = int.from_bytes(content, "little")
        content += file.read(max(0, min(length, size - 8, _LONGEST_HEADER)))
        signed = _CHECKSUM.search(content, 8)
        if signed is None:
            raise CheckpointError(f"{path} is no file of jqobs.save, or it is damaged: its header has no checksum")
        try:
            tensors = (part for name, part in _header(content).items() if name != "__metadata__")
            declared = 8 + length + max((part["data_offsets"][1] for part in tensors), default=0)
            if size != declared:
                raise ValueError(f"it has {size} bytes, and its header is for {declared}")
            content += file.read(size - len(content))
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError, MemoryError) as error:
            raise CheckpointError(f"{path} is no file of jqobs.save, or it is damaged: {error!r}") from error
    return content, *signed.span(1)


def _header(content: bytes) -> Any:
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def _check(node: Any, unclaimed: dict[str, np.ndarray], depth: int = 0) -> None:
    """Holds what the header says against what is there; each tensor is claimed by one array."""
    kind, more = node["kind"], {"array": {"tensor", "shape", "dtype"}, "QParams": {"static", "entries"}}
    if type(kind) is not str or node.keys() != {"kind"} | more.get(kind, {"entries"}) or depth > DEEPEST:
        raise ValueError(f"what is {kind!r}?")
    if kind == "array":
        tensor = unclaimed.pop(node["tensor"])
        _check_same(node["shape"], list(tensor.shape))
        _check_same(node["dtype"], tensor.dtype.name)
        return
    names = [name for name, _ in node["entries"]]
    if not all(type(name) is str for name in names) or len({*names}) < len(names):
        raise ValueError(f"names must be strings, and differ; got {names}")
    for _, part in node["entries"]:
        _check(part, unclaimed, depth + 1)
    if kind == "QParams":
        _check_same(node["static"], _static(_grid(node["static"], None, None)))
        _check_same(
            [[name, part["kind"]] for name, part in node["entries"]],
            [[each, "array"] for each in ("scale", "zero_point")],
        )


def _check_same(found: Any, expected: Any) -> None:
    # As text, in which 1 is neither 1.0 nor true.
    if json.dumps(found, sort_keys=True) != json.dumps(expected, sort_keys=True):
        raise ValueError(f"{found} should be {expected}")


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError("saving and loading need safetensors: pip install 'jqobs[checkpoint]'") from error
    return safetensors.numpy
