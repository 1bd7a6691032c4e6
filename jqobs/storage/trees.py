"""A tree of states as the header of a file describes it, and back."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqobs.models.state import ModelState, empty_state
from jqobs.quantization.qparams import QParams
from jqobs.storage.encoding import (
    decode_assignment,
    decode_spec,
    decode_value,
    encode_assignment,
    encode_spec,
)
from jqobs.storage.files import CheckpointError

DTYPES = {np.dtype(code).name for code in "?efdbBhHiIqQ"}
"""What an array may hold: booleans, floats and integers of up to 64 bits."""

DEEPEST = 100
"""How far a tree may be nested: a header that never ends must not exhaust the stack."""

Node = dict[str, Any]
"""What the header says of a part of a tree: its kind, what of it is no array, and its entries by name; of an array its
shape and dtype."""

Place = tuple[str, ...]


def describe(tree: Any, at: Place, leaves: dict[str, Any]) -> Node:
    """What a tree is made of; its arrays go to `leaves`, each under a name that its place in the header tells.

    Raises:
      ValueError: Something that would not come back as it is.
    """
    if len(at) > DEEPEST:
        raise ValueError(f"tree must be nested at most {DEEPEST} deep; {name_of(at)} is deeper")
    parts: Mapping[str, Any]
    node: Node
    if isinstance(tree, ModelState):
        parts, node = dict(tree), {"kind": "ModelState", "static": encode_assignment(tree.assignment)}
    elif isinstance(tree, QParams):
        parts = dict(zip(("scale", "zero_point"), tree, strict=True))
        node = {"kind": "QParams", "static": encode_spec(tree.spec)}
    elif hasattr(tree, "_fields"):
        parts, node = tree._asdict(), {"kind": type(tree).__name__}
    elif isinstance(tree, Mapping) and not jax.tree_util.all_leaves([tree]):
        if not all(isinstance(key, str) for key in tree):
            raise ValueError(f"tree must have strings for keys; {name_of(at)} has {list(tree)}")
        parts, node = {key: tree[key] for key in sorted(tree)}, {"kind": "dict"}
    else:
        leaf = _array(tree, at)
        tensor = f"{len(leaves)}:{'/'.join(at)}"
        leaves[tensor] = leaf
        return {"kind": "array", "tensor": tensor, "shape": list(leaf.shape), "dtype": leaf.dtype.name}
    return {**node, "entries": [[name, describe(part, (*at, name), leaves)] for name, part in parts.items()]}


def compare(node: Node, like: Any) -> list[str]:
    """What of a description is not as in a tree: missing, unexpected, or of another kind, shape or dtype."""
    found, expected = dict(_walk(node)), dict(_walk(describe(like, (), {})))
    wrong = [f"missing {name_of(at)}" for at in expected if at not in found]
    wrong += [f"unexpected {name_of(at)}" for at in found if at not in expected]
    for at in expected.keys() & found.keys():
        have, want = (_summary(each[at]) for each in (found, expected))
        if have != want:
            wrong.append(f"{name_of(at)} is {have} and not {want}")
        elif found[at]["kind"] == "ModelState":
            wrong += _compare_models(at, found[at]["static"], expected[at]["static"])
    return wrong


def build(node: Node, tensors: Mapping[str, np.ndarray], like: Any = None) -> Any:
    """The tree that is described: like another, if given, that was compared with it before.

    Raises:
      CheckpointError: Without `like`: it holds what does not say itself how it is built, or 64 bits that JAX would cut.
    """
    if like is not None:
        nodes = dict(_walk(node))
        return jax.tree_util.tree_map_with_path(lambda keys, leaf: build(nodes[_place(keys)], tensors), like)
    kind = node["kind"]
    if kind == "array":
        tensor = tensors[node["tensor"]]
        if not _fits(tensor.dtype.name):
            raise CheckpointError(f"it holds {tensor.dtype.name}, for which JAX needs jax_enable_x64")
        return jnp.array(tensor, copy=True)
    if kind == "ModelState":
        assignment = decode_assignment(node["static"])
        like = jax.eval_shape(lambda: empty_state(assignment))
        states = dict(node["entries"])
        for name, state in like.items():
            wrong = [each for each in compare(states[name], state) if " and not an array " not in each]
            if wrong:  # Shapes may have axes in front, such as those of devices.
                raise CheckpointError(f"the state of {name} is none of {assignment.observers[name]!r}: {wrong[0]}")
        return build(node, tensors, like)
    if states := _states(node):
        raise CheckpointError(f"like must be given to load it: it holds {', '.join(sorted(states))}")
    parts = {name: build(part, tensors) for name, part in node["entries"]}
    return parts if kind == "dict" else QParams(**parts, spec=decode_spec(node["static"]))


def _states(node: Node) -> set[str]:
    """The kinds of state that do not say how they are built; of one inside another the outer."""
    if node["kind"] in ("dict", "QParams"):
        return set().union(*(_states(part) for _, part in node["entries"]))
    return set() if node["kind"] in ("array", "ModelState") else {node["kind"]}


def check(node: Any, unclaimed: dict[str, np.ndarray], depth: int = 0) -> None:
    """Holds what a header says against what is there; each tensor is claimed by one array.

    Raises:
      Exception: It contradicts itself, somehow.
    """
    kind = node["kind"]
    keys = {
        "array": {"tensor", "shape", "dtype"},
        "QParams": {"static", "entries"},
        "ModelState": {"static", "entries"},
    }
    if type(kind) is not str or node.keys() != {"kind"} | keys.get(kind, {"entries"}) or depth > DEEPEST:
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
        check(part, unclaimed, depth + 1)
    if kind == "QParams":
        _check_same(node["static"], encode_spec(decode_spec(node["static"])))
        kinds = [[name, part["kind"]] for name, part in node["entries"]]
        _check_same(kinds, [["scale", "array"], ["zero_point", "array"]])
    if kind == "ModelState":
        _check_same(names, list(node["static"]["observers"]))
        with contextlib.suppress(CheckpointError):  # With observers of somebody else it is read by `like` alone.
            _check_same(node["static"], encode_assignment(decode_assignment(node["static"])))


def name_of(at: Place) -> str:
    """A place in words.

    Example:
      >>> from jqobs.storage.trees import name_of
      >>> name_of(("a", "b")), name_of(())
      ('a/b', 'the tree itself')
    """
    return "/".join(at) or "the tree itself"


def _array(leaf: Any, at: Place) -> Any:
    """A leaf, if it comes back as it is; its values are not looked at. A Python number is what JAX makes of it."""
    if type(leaf) in (bool, int, float):
        with contextlib.suppress(OverflowError):
            leaf = jnp.asarray(leaf)
    name = getattr(getattr(leaf, "dtype", None), "name", None)
    if name not in DTYPES or not hasattr(leaf, "shape"):
        raise ValueError(f"tree must hold states, QParams, arrays and dicts; got {leaf!r} at {name_of(at)}")
    if not _fits(name):
        raise ValueError(f"tree must hold what JAX does; {name} at {name_of(at)} needs a cast, or jax_enable_x64")
    return leaf


def _fits(dtype: str) -> bool:
    """Whether JAX, as it is configured, holds such numbers without cutting them."""
    return jax.dtypes.canonicalize_dtype(dtype).name == dtype


def _walk(node: Node, at: Place = ()) -> Iterator[tuple[Place, Node]]:
    yield at, node
    for name, part in node.get("entries", ()):
        yield from _walk(part, (*at, name))


def _summary(node: Node) -> str:
    if node["kind"] == "array":
        return f"an array {tuple(node['shape'])} of {node['dtype']}"
    static = node.get("static", {}).values() if node["kind"] == "QParams" else ()
    return " ".join(map(str, [node["kind"], *static]))


def _compare_models(at: Place, have: Mapping[str, Any], want: Mapping[str, Any]) -> list[str]:
    """In what two states of models of the same sites differ; the size of a batch does not matter."""
    return [
        f"{name_of((*at, name))} was observed by {_in_words(have['observers'][name])} and not by {_in_words(observer)}"
        for name, observer in want["observers"].items()
        if name in have["observers"] and have["observers"][name] != observer
    ]


def _in_words(encoded: Any) -> str:
    return encoded["foreign"] if "foreign" in encoded else repr(decode_value(encoded))


def _place(keys: tuple[Any, ...]) -> Place:
    """The place that JAX calls by these keys."""
    return tuple(key.key if hasattr(key, "key") else key.name for key in keys)


def _check_same(found: Any, expected: Any) -> None:
    # As text, in which 1 is neither 1.0 nor true.
    if json.dumps(found, sort_keys=True) != json.dumps(expected, sort_keys=True):
        raise ValueError(f"{found} should be {expected}")
