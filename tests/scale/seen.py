"""What callers of an engine see of some requests."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from nanoengine.core.outputs import CompletionOutput, RequestOutput


def told(outputs: list[RequestOutput]) -> list[Any]:
    """All of it, to the bit."""
    names = [field.name for field in fields(CompletionOutput)]
    return [
        ([getattr(own, name) for name in names], output.prompt_logprobs) for output in outputs for own in output.outputs
    ]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children(pid: int, module: str) -> list[int]:
    """Processes of a module that a process has started."""
    found = [own for task in Path(f"/proc/{pid}/task").iterdir() for own in (task / "children").read_text().split()]
    return sorted(int(own) for own in found if module in Path(f"/proc/{own}/cmdline").read_text())
