"""What is known of the tensors of a checkpoint without reading them, and whether they are those of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nanoengine.core.weights import EMBEDDING, HEAD
from nanoengine.errors import InvalidWeights

FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What is known of a tensor without reading it."""

    name: str
    dtype: str  # one of FLOATS, if it can be loaded
    shape: list[int]
    file: str  # for messages


def check_headers(shapes: Mapping[str, Sequence[int]], headers: Iterable[TensorHeader], place: str) -> None:
    """Raise InvalidWeights unless there are exactly these tensors, each once, of some float dtype; and perhaps a tied head."""
    missing = dict.fromkeys(shapes)
    unexpected: list[str] = []
    repeated: list[str] = []
    misshapen: list[str] = []
    for header in headers:
        name = header.name
        expected = shapes.get(EMBEDDING if name == HEAD and HEAD not in shapes else name)
        if expected is None:
            unexpected.append(name)
        elif name in shapes and name not in missing:
            repeated.append(f"{name} in {header.file}")
        elif tuple(header.shape) != tuple(expected) or header.dtype not in FLOATS:
            misshapen.append(f"{name} is {header.dtype} {header.shape}, not a float {list(expected)}")
        missing.pop(name, None)
    problems = {"missing": list(missing), "unexpected": unexpected, "repeated": repeated, "misshapen": misshapen}
    lines = [f"{kind} ({len(names)}): {_some(names)}" for kind, names in problems.items() if names]
    if lines:
        raise InvalidWeights(f"the weights in {place} do not match the config beside them: " + "; ".join(lines))


def _some(names: list[str]) -> str:
    return ", ".join(name[:500] for name in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
