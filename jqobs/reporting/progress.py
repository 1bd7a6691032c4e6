"""A progress bar for whatever takes more than a few seconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def progress_bar(items: Iterable[T], what: str, *, progress: bool) -> Iterator[T]:
    """The items, with a bar on the way if asked for.

    Raises:
      ImportError: The extra `progress` is not installed.

    Example:
      >>> from jqobs.reporting.progress import progress_bar
      >>> list(progress_bar([1, 2], "calibrate", progress=False))
      [1, 2]
    """
    if not progress:
        return iter(items)
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError("progress=True needs tqdm: pip install 'jqobs[progress]'") from error
    return iter(tqdm(items, desc=what, unit="batch"))
