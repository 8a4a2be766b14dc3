"""What speculation tells processors of the drafts of a step. Samples are named by their numbers."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Drafts(Protocol):
    """Drafts that stand before samples."""

    def before(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """The drafts of the runs of some samples, [m, most], and whether each stands before the sample, the same; those that do
        not may be no tokens at all.
        """
        ...


class Verified(Protocol):
    """Which drafts of a step were accepted."""

    @property
    def is_token(self) -> Tensor:
        """[num_samples] bool: whether the sample is a token of its row."""
        ...
