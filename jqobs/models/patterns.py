"""How parts of a model are named: one language of patterns, wherever a part is asked for.

A name is a path joined by "/", such as `layers/0/mlp/up/lhs`. A pattern that names a module holds for all that lies
inside it. Of several patterns the one counts that is the name itself; else the one that is the innermost module around
it; else the first glob (`*` for any characters, "/" too, `?` and `[...]` as in `fnmatch`) that fits the name or a
module around it.
"""

from __future__ import annotations

import difflib
import fnmatch
import itertools
from collections.abc import Collection, Iterable, Sequence


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern holds for a name: fits it, or a module around it.

    Example:
      >>> from jqobs.models.patterns import matches
      >>> matches("layers/*/mlp", "layers/0/mlp/up/lhs"), matches("mlp", "layers/0/mlp")
      (True, False)
    """
    # Names may hold brackets: one always fits itself.
    return any(part == pattern or fnmatch.fnmatchcase(part, pattern) for part in _around(name))


def find_pattern(name: str, patterns: Collection[str]) -> str | None:
    """Which of several patterns, in their order, holds for a name; None if none does.

    Example:
      >>> from jqobs.models.patterns import find_pattern
      >>> find_pattern("layers/0/up/lhs", ["*", "layers/0", "layers/0/up"])
      'layers/0/up'
    """
    for part in reversed(_around(name)):
        if part in patterns:
            return part
    return next((pattern for pattern in patterns if matches(pattern, name)), None)


def find_names(pattern: str, names: Iterable[str], *, of: str = "site") -> list[str]:
    """The names that a pattern holds for.

    Raises:
      ValueError: There is none; the error shows the nearest.

    Example:
      >>> from jqobs.models.patterns import find_names
      >>> find_names("up/lsh", ["up/lhs"])
      Traceback (most recent call last):
      ValueError: the pattern 'up/lsh' matches no site; the nearest are up/lhs
    """
    if not isinstance(pattern, str):
        raise ValueError(f"a pattern must be a string over {of} names, such as 'layers/*/mlp/*'; got {pattern!r}")
    names = list(names)
    matched = [name for name in names if matches(pattern, name)]
    if not matched:
        raise ValueError(f"the pattern {pattern!r} matches no {of}; {suggest(pattern, names)}")
    return matched


def suggest(name: str, names: Iterable[str]) -> str:
    """Names near to one that is not there, in words.

    Example:
      >>> from jqobs.models.patterns import suggest
      >>> suggest("up/lsh", ["up/lhs", "down/rhs"])
      'the nearest are up/lhs, down/rhs'
    """
    nearest: Sequence[str] = difflib.get_close_matches(name, list(names), n=5, cutoff=0.0)
    return f"the nearest are {', '.join(nearest)}" if nearest else "there is none"


def _around(name: str) -> list[str]:
    """A name and the modules around it, from the outermost to itself."""
    return list(itertools.accumulate(name.split("/"), "{}/{}".format))
