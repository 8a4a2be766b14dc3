"""Reading the machine code of a compiled library: its inner loops, and what they keep on the stack."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FUNCTION = re.compile(r"^[0-9a-f]+ <(.+)>:$")
INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\s+(.+?)\s*(?:#.*)?$")
JUMP = re.compile(r"^j\w+\s+([0-9a-f]+)\b")
SLOT = r"-?(?:0x[0-9a-f]+)?\(%r[sb]p\)"  # on the stack: an array there is reached by an index or a pointer


@dataclass(frozen=True)
class Loop:
    """A loop that has no other in it: its function, and its instructions as objdump writes them."""

    function: str
    code: tuple[str, ...]

    def multiplies(self, register: str) -> bool:
        """Whether it multiplies floats in whole registers: "ymm" or "zmm"."""
        return any(re.match(rf"v(fn?m\w+|mul|dpbf16)ps\s.*%{register}", line) for line in self.code)

    def stores(self, register: str) -> int:
        """How often it puts a whole register on the stack."""
        return sum(bool(re.search(rf"%{register}\d+,{SLOT}$", line)) for line in self.code)

    def loads(self, register: str) -> int:
        """How often it takes a whole register from the stack."""
        return sum(bool(re.search(rf"\s{SLOT},.*%{register}", line)) for line in self.code)


def inner_loops(library: Path) -> list[Loop]:
    """The inner loops of all functions of a library for x86-64."""
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", str(library)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [loop for name, code in _functions(listing) for loop in _inner_loops(name, code)]


def _functions(listing: str) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    name, code = "", list[tuple[int, str]]()
    for line in listing.splitlines():
        if start := FUNCTION.match(line):
            yield name, code
            name, code = start[1], []
        elif instruction := INSTRUCTION.match(line):
            code.append((int(instruction[1], 16), instruction[2]))
    yield name, code


def _inner_loops(function: str, code: list[tuple[int, str]]) -> Iterator[Loop]:
    spans = []
    for address, text in code:
        jump = JUMP.match(text)
        if jump and code[0][0] <= int(jump[1], 16) <= address:
            spans.append((int(jump[1], 16), address))
    for start, end in spans:
        if not any(start <= a and b <= end and (a, b) != (start, end) for a, b in spans):
            body = tuple(text for address, text in code if start <= address <= end)
            if not any(text.startswith("ret") for text in body):  # else blocks of other places lie between
                yield Loop(function, body)
