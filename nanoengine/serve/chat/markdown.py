"""The final part of a growing text in Markdown, and text without control characters."""

from __future__ import annotations

import re

FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")
CONTROL = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
"""Characters that control a terminal: no answer of a model may send them."""


def final_length(text: str) -> int:
    """The length of the part whose drawing no later text can change: up to the end of the last whole block; 0: there is none.

    A block ends at an empty line outside a fence, if the next line begins and is not indented: such a line belongs to a list.
    """
    end = offset = 0
    fence = ""
    after_empty = False
    for line in text.splitlines(keepends=True):
        if after_empty and not fence and line[:1] not in " \t\n":
            end = offset
        match = FENCE.match(line)
        if match and not fence:
            fence = match[1]
        elif match and match[1].startswith(fence) and not match[2].strip():
            fence = ""
        after_empty = not line.strip()
        offset += len(line)
    return end


def printable(text: str) -> str:
    """A text without characters that control a terminal."""
    return text.translate(CONTROL)
