"""Files that are there whole or not at all, and that say of every bit whether it is as it was written."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import stat
from typing import Any

UNSIGNED = b"0" * 64
"""Stands for the checksum while it is computed."""

_LONGEST_HEADER = 100_000_000  # That of safetensors.
_CHECKSUM = re.compile(rb'\\"checksum\\": \\"([0-9a-f]{64})\\"')  # JSON inside JSON.


class CheckpointError(ValueError):
    """A file that cannot be read: no checkpoint, damaged, of a newer library, or not of what it is to be read into."""


def write_signed(path: str, unsigned: bytes) -> None:
    """Writes a file with its checksum: beside its place, and moved there when it is on the disk.

    Args:
      path: Where to.
      unsigned: The content, with `UNSIGNED` where the checksum goes.

    Raises:
      OSError: The disk is full, the directory cannot be written to, the path is a pipe or a device, ...
    """
    content = unsigned.replace(UNSIGNED, _digest(unsigned), 1)
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


def read_signed(path: str) -> bytes:
    """Reads a file back, if it is as it was written.

    Raises:
      CheckpointError: It is damaged, or no such file.
      OSError: It cannot be opened.
    """
    content, start, end = _content(path)
    if _digest(content[:start] + UNSIGNED + content[end:]) != content[start:end]:
        raise CheckpointError(f"{path} is damaged: its checksum does not fit")
    return content


def header_of(content: bytes) -> Any:
    """What the header of a safetensors file says."""
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


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
            tensors = (part for name, part in header_of(content).items() if name != "__metadata__")
            declared = 8 + length + max((part["data_offsets"][1] for part in tensors), default=0)
            if size != declared:
                raise ValueError(f"it has {size} bytes, and its header is for {declared}")
            content += file.read(size - len(content))
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError, MemoryError) as error:
            raise CheckpointError(f"{path} is no file of jqobs.save, or it is damaged: {error!r}") from error
    return content, *signed.span(1)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()
