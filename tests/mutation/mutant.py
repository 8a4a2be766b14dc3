"""Mutant: one small mistake in the code, and the tests that must notice it."""

from __future__ import annotations

from pathlib import Path
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


def read_mutants(path: Path = Path(__file__).parent / "mutants.txt") -> dict[str, list[Mutant]]:
    """The mutants of each room, in the order of the file, which explains its form."""
    rooms: dict[str, list[Mutant]] = {}
    for block in path.read_text().partition("\n\n# ROOM\n")[2].split("\n\n")[1:]:
        head, *lines = block.rstrip("\n").split("\n")
        if head.startswith("## "):
            file, *tests = head.removeprefix("## ").split(" | ")
        elif head.startswith("# "):
            own = rooms.setdefault(head.removeprefix("# "), [])
        else:
            name, _, breaks = head.partition(": ")
            old, new, survives = ("\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+?")
            own.append(Mutant(name, file, old, new, breaks, tuple(tests), survives))
    return rooms
