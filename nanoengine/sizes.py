"""Sizes in bytes as text for people, such as "2GiB"."""

from __future__ import annotations

import re

from nanoengine.core.errors import InvalidConfig, shown

SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)(?:([kmgt])(ib?|b)?|b)?")


def parse_bytes(name: str, text: str) -> int:
    """The bytes of a text: "2GiB" and "2G" are of 1024, "2GB" of 1000; without a unit, bytes.

    Raises:
        InvalidConfig: the text is no size; the message begins with `name`.
    """
    match = SIZE.fullmatch(text[:50].strip().lower().replace(" ", ""))
    if match is None:
        raise InvalidConfig(f"{name} is {shown(text)}: it must be a number of bytes, or such as '2GiB' or '500MB'")
    number, unit, kind = match.groups()
    return int(float(number) * (1000 if kind == "b" else 1024) ** (" kmgt".index(unit) if unit else 0))


def format_bytes(num_bytes: int) -> str:
    """The text of a number of bytes in messages: "1.5 GiB"; fewer than 1024 as they are."""
    for bits, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 1 << bits:
            return f"{num_bytes / (1 << bits):,.3f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{num_bytes} bytes"
