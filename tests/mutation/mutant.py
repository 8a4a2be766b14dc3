"""Mutant: one small mistake in the code, and the tests that must notice it."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """A mistake that somebody could really make.

    Files move and are rewritten. `breaks` then says which mistake is to be made again in the new code.

    Attributes:
        name: unique among all mutants.
        file: the file that is changed, from the root of the checkout.
        old: text that occurs once in it.
        new: what stands there instead.
        breaks: what goes wrong, in one sentence that names no code.
        tests: paths of tests, some of which must fail; they take seconds.
        survives: why no test fails, of a mutant that is known to survive; empty for all others.
    """

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]
    survives: str = ""

    def apply(self, text: str) -> str | None:
        """The text of the file with the mistake in it; None if `old` does not occur exactly once."""
        return text.replace(self.old, self.new) if text.count(self.old) == 1 else None
