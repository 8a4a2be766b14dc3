"""Protocols of the drafts of a step, between speculation and processors. Samples are identified by their numbers."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Drafts(Protocol):
    """Drafts before samples."""

    def before(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """The drafts of the runs of m samples, [m, most] int64, and whether each is before the sample, [m, most] bool. Values of
        other drafts are undefined.
        """
        ...


class Verified(Protocol):
    """Which drafts of a step were accepted."""

    @property
    def is_token(self) -> Tensor:
        """[num_samples] bool: whether the sample is a token of its row."""
        ...
