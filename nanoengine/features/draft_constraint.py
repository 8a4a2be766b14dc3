"""DraftConstraint: what decides over the next tokens of a sequence besides the model."""

from __future__ import annotations

from typing import Protocol

CONSTRAINT = "constraint"
"""In `Sequence.state`: the `DraftConstraint` of a sequence that has one."""


class DraftConstraint(Protocol):
    """A grammar, or the limit of a thought."""

    def forced(self, most: int) -> list[int]:
        """The next tokens, as far as there is no choice."""

    def allowed(self, drafts: list[int]) -> list[int]:
        """The first of some drafts, as far as they may come."""
