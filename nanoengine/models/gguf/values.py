"""Values in the metadata of a GGUF file, checked for their types.

Raises:
    UnsupportedModel: by every function, for a value that is missing or of another type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nanoengine.errors import UnsupportedModel, shown

_MISSING = object()


def get(metadata: Mapping[str, Any], key: str, kind: type, default: Any = _MISSING) -> Any:
    """The value of a key, of one type; a missing key without a default is an error."""
    value = metadata.get(key, default)
    if value is _MISSING:
        raise UnsupportedModel(f"the GGUF file has no {key}; give the model's tokenizer.json with the option tokenizer")
    if value is not default and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise UnsupportedModel(f"{key} is {shown(value)}: it must be of type {kind.__name__}")
    return value


def strings(metadata: Mapping[str, Any], key: str, default: Any = _MISSING) -> list[str]:
    """A list of strings."""
    values: list[Any] = get(metadata, key, list, default)
    if not {str}.issuperset(map(type, values)):
        wrong = next(value for value in values if type(value) is not str)
        raise UnsupportedModel(f"{key} has {shown(wrong)}: it must be a list of strings")
    return values


def numbers(metadata: Mapping[str, Any], key: str, length: int, default: float | None = None) -> np.ndarray:
    """A float64 for each of `length` tokens; a missing key with a default is that number for all."""
    values = metadata.get(key)
    if values is None and default is not None:
        return np.full(length, default)
    if not isinstance(values, np.ndarray) or values.shape != (length,):
        raise UnsupportedModel(f"{key} is {shown(values)}: it must have a number for each of {length} tokens")
    return values.astype(np.float64)
