"""Texts that every Python has: modules that the demo model has not seen, and the reference of the language."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

from nanoengine.models.names import DEMO
from nanoengine.models.tokenizer import ModelTokenizer


def windows(kinds: list[str], tokenizer: ModelTokenizer, count: int, length: int) -> list[list[int]]:
    """Pieces of texts, as many of each kind, evenly spread over all that there are; fewer, if there are not so many.

    Args:
        kinds: of `TEXTS`.
        tokenizer: what it puts before a text, it puts before each piece.
        count: of the pieces of each kind.
        length: of each, in tokens.
    """
    before = tokenizer.encode("")
    size = length - len(before)
    found = []
    for kind in kinds:
        pieces = []
        for text in TEXTS[kind]():
            tokens = tokenizer.encode(text)[len(before) :]
            pieces += [before + tokens[at : at + size] for at in range(0, len(tokens) - size + 1, size)]
        number = min(count, len(pieces))
        found += [pieces[i * len(pieces) // number] for i in range(number)]
    return found


def _code() -> Iterator[str]:
    """Held-out modules of the standard library, those that this Python still has."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in (DEMO / "heldout.txt").read_text().split():
        if (library / name).is_file():
            yield (library / name).read_text(encoding="utf-8")


def _prose() -> Iterator[str]:
    """The language reference, as `help` shows it; its shortest topics are joined."""
    yield "\n\n".join(topics[name] for name in sorted(topics))


TEXTS: dict[str, Callable[[], Iterator[str]]] = {"code": _code, "prose": _prose}
