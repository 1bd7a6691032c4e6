"""How a real range is laid on the codes, and whether channels have a range of their own."""

from __future__ import annotations

import enum


class QScheme(enum.Enum):
    """How a real range is laid on the codes, and whether channels have a range of their own.

    Affine: the range may lie anywhere around zero and the zero point moves. Symmetric: the range is `-a..a` and the
    zero point is the middle code.

    Example:
      >>> import jqobs
      >>> jqobs.per_channel_symmetric.is_symmetric, jqobs.per_channel_symmetric.is_per_channel
      (True, True)
    """

    PER_TENSOR_AFFINE = "per_tensor_affine"
    PER_TENSOR_SYMMETRIC = "per_tensor_symmetric"
    PER_CHANNEL_AFFINE = "per_channel_affine"
    PER_CHANNEL_SYMMETRIC = "per_channel_symmetric"

    @property
    def is_symmetric(self) -> bool:
        """Whether the range is symmetric around zero."""
        return self.value.endswith("symmetric")

    @property
    def is_per_channel(self) -> bool:
        """Whether every channel (or group of a channel) has a scale of its own."""
        return self.value.startswith("per_channel")

    def __repr__(self) -> str:
        return self.value


per_tensor_affine = QScheme.PER_TENSOR_AFFINE
per_tensor_symmetric = QScheme.PER_TENSOR_SYMMETRIC
per_channel_affine = QScheme.PER_CHANNEL_AFFINE
per_channel_symmetric = QScheme.PER_CHANNEL_SYMMETRIC
