"""DraftConstraint: the protocol of constraints on the next tokens of a sequence, between capabilities and speculation."""

from __future__ import annotations

from typing import Protocol

CONSTRAINT = "constraint"
"""In `Sequence.state`: the `DraftConstraint` of a sequence that has one."""


class DraftConstraint(Protocol):
    """The constraint of a grammar, or of a thought's budget."""

    def forced(self, most: int) -> list[int]:
        """The next tokens that are the only allowed ones, at most `most`."""

    def allowed(self, drafts: list[int]) -> list[int]:
        """The drafts before the first that is not allowed."""
