"""Names of operations that a person recognises: from the scopes they lie in, and the argument leaf that feeds them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

Path = tuple[str, ...]

_OF_JAX = {"rematted_computation"}
"""Scopes that JAX opens itself."""

_PLAIN_LEAVES = {"kernel", "weight", "w", "embedding"}
"""Names that say no more of a weight than that it is one."""


class Unnamed(NamedTuple):
    """What an operation can be named by.

    Attributes:
      primitive: The name of its primitive, such as `dot_general`.
      scope: The names around it, from the outside in, as a profiler shows them.
      leaf: The path of the argument leaf that an operand is a view of; None where there is none.
      sources: The places, in the list of all operations, of those whose results its operands are made of.
    """

    primitive: str
    scope: Path
    leaf: Path | None
    sources: tuple[int, ...]


def name_operations(operations: Sequence[Unnamed], models: Collection[str] = ()) -> list[str]:
    """Names each of the operations of a program: "/"-separated, unlike any other, and free of glob characters.

    A Linen module names its operations by its path, a scope that the user gave stands in front, and elsewhere the leaf
    that feeds a weight names the operation (`layers/3/mlp/up`). One without a weight is named by its einsum, or by its
    primitive, beside those that its operands come from.

    Args:
      operations: The operations, in the order of the program.
      models: The names of classes of models. A Linen model opens a scope under that name around all else, which is no
        part of any module path.

    Example:
      >>> from jqobs.tracing.naming import Unnamed, name_operations
      >>> up = Unnamed("dot_general", (), ("mlp", "up", "kernel"), ())
      >>> name_operations([up, up, Unnamed("dot_general", (), None, (0, 1))])
      ['mlp/up', 'mlp/up_1', 'mlp/dot_general']
    """
    names: list[str] = []
    for operation in operations:
        scope = _modules(operation.scope)
        root = next((place for place, name in enumerate(scope[:-1]) if name in models), None)
        scope = scope if root is None else scope[:root] + scope[root + 1 :]
        name = re.sub(r"[*?\[\]\s]", "_", "/".join(_path(operation, scope, names)))
        names.append(_unlike(names, name))
    return names


def shared_path(a: Path, b: Path) -> Path:
    """What two paths begin with.

    Example:
      >>> from jqobs.tracing.naming import shared_path
      >>> shared_path(("mlp", "up"), ("mlp", "down"))
      ('mlp',)
    """
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return tuple(one for one, _ in pairs)


def _path(operation: Unnamed, scope: Path, names: Sequence[str]) -> Path:
    if operation.leaf is not None:
        own = _own(operation.leaf)
        for length in range(len(scope), 0, -1):  # A leaf and a scope of one module share its path.
            for start in range(len(own) - length + 1):
                if own[start : start + length] == scope[-length:]:
                    return scope + own[start + length :]
        return scope + own or operation.leaf[-1:] or (operation.primitive,)
    parents = [tuple(names[source].split("/")[:-1]) for source in operation.sources]
    shared = parents[0] if parents and not scope else ()
    for parent in parents[1:]:
        shared = shared_path(shared, parent)
    return (*scope, *shared, next(iter(_einsums(operation.scope)), operation.primitive))


def _own(leaf: Path) -> Path:
    """The part of the path of a leaf that tells it from others: without the collection and a last `kernel`."""
    leaf = leaf[1:] if leaf[:1] == ("params",) and len(leaf) > 1 else leaf
    return leaf[:-1] if _PLAIN_LEAVES.intersection(leaf[-1:]) else leaf


def _modules(scope: Path) -> Path:
    """Without einsums, and without the methods that Linen writes as `module.method`."""
    modules: list[str] = []
    for name in scope:
        module, dot, method = name.partition(".")
        called = bool(module and dot and method.isidentifier())
        if "->" in name or name in _OF_JAX or (called and modules[-1:] == [module]):
            continue
        # A module calls itself inside its own method: `cell.scan_fn` around `cell`.
        if modules[-1:] == [name] and scope[scope.index(name) - 1].startswith(f"{name}."):
            continue
        modules.append(module if called else name)
    return tuple(modules)


def _einsums(scope: Path) -> list[str]:
    return [name.replace("...", "") for name in scope[-1:] if "->" in name]


def _unlike(names: Sequence[str], name: str) -> str:
    taken, numbered, number = set(names), name, 0
    while numbered in taken:
        number += 1
        numbered = f"{name}_{number}"
    return numbered
