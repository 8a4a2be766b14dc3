"""Which layers of a model have a window, in the words of config.json."""

from __future__ import annotations

from collections.abc import Sequence

from nanoengine.models.config_fields import MAX_LAYERS, ConfigFields
from nanoengine.models.rope_config import LAYER_TYPES

FULL, SLIDING = LAYER_TYPES


def window_of(fields: ConfigFields, default: int | None = None) -> int | None:
    """Tokens that a layer sees; `default` if the file does not mention it, none if it says null."""
    if "sliding_window" not in fields:
        return default
    return fields.integer("sliding_window") if fields.get("sliding_window") is not None else None


def layer_types_of(fields: ConfigFields, kinds: Sequence[str] = LAYER_TYPES) -> list[str] | None:
    """The kind of each layer that the file states, one of `kinds`; None if it states none."""
    types, count = fields.get("layer_types"), fields.integer("num_hidden_layers", most=MAX_LAYERS)
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != count or not all(kind in kinds for kind in types):
        raise fields.wrong("layer_types", types, f"it must be a list of {count} of {', '.join(kinds)}")
    return types


def types_by_pattern(fields: ConfigFields, period: int) -> list[str]:
    """The type of each layer: as stated, or every layer slides but each `period`-th."""
    count = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    return layer_types_of(fields) or [FULL if (i + 1) % period == 0 else SLIDING for i in range(count)]


def windows_by_types(types: Sequence[str], window: int | None) -> list[int | None]:
    """The window of each layer."""
    return [window if kind == SLIDING else None for kind in types]


def windows_of_qwen(fields: ConfigFields, *, alternate: bool = False) -> list[int | None]:
    """The window of each layer: by their types, or of those behind the first `max_window_layers`, or of every other among these;
    none unless they are used.
    """
    types, first = layer_types_of(fields), fields.get("max_window_layers", 28)
    window = window_of(fields, 4096) if fields.flag("use_sliding_window") else None
    if isinstance(first, bool) or not isinstance(first, int):
        raise fields.wrong("max_window_layers", first, "it must be a number of layers")
    count = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    slides = [i % 2 == 0 and i < first if alternate else i >= first for i in range(count)]
    return windows_by_types(types or [SLIDING if own else FULL for own in slides], window)
