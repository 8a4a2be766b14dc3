"""Fields of config.json of sliding windows: layer types, and the window of each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nanoengine.models.config_fields import MAX_LAYERS, ConfigFields
from nanoengine.models.model_config import LayerConfig, RopeConfig
from nanoengine.models.rope_config import LAYER_TYPES

FULL, SLIDING = LAYER_TYPES


def window_of(fields: ConfigFields, default: int | None = None) -> int | None:
    """The field `sliding_window` in tokens; `default` if the file lacks it, None if it is null."""
    return fields.nullable("sliding_window", default, fields.integer)


def layer_types_of(fields: ConfigFields, kinds: Sequence[str] = LAYER_TYPES) -> list[str] | None:
    """The field `layer_types`, each one of `kinds`; None if the file lacks it.

    Raises:
        UnsupportedModel: another type, or another number of layers.
    """
    types, count = fields.get("layer_types"), fields.integer("num_hidden_layers", most=MAX_LAYERS)
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != count or not all(kind in kinds for kind in types):
        raise fields.wrong("layer_types", types, f"it must be a list of {count} of {', '.join(kinds)}")
    return types


def types_by_pattern(fields: ConfigFields, period: int) -> list[str]:
    """The field `layer_types`; by default all layers slide except each `period`-th."""
    count = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    return layer_types_of(fields) or [FULL if (i + 1) % period == 0 else SLIDING for i in range(count)]


def windows_by_types(types: Sequence[str], window: int | None) -> list[int | None]:
    """The window of each layer: `window` where it slides."""
    return [window if kind == SLIDING else None for kind in types]


def layers_by_types(
    types: Sequence[str], ropes: Mapping[str, RopeConfig | None], window: int | None
) -> tuple[LayerConfig, ...]:
    """Layers with the rotation of their type, and with `window` where they slide."""
    windows = windows_by_types(types, window)
    return tuple(LayerConfig(rope=ropes[kind], window=size) for kind, size in zip(types, windows, strict=True))


def windows_of_qwen(fields: ConfigFields, *, alternate: bool = False) -> list[int | None]:
    """The window of each layer of Qwen 2 and 3: by `layer_types`, or in all layers from `max_window_layers` on; with `alternate`,
    in every other layer before that number. None unless `use_sliding_window` is true.

    Raises:
        UnsupportedModel: `max_window_layers` is not a number.
    """
    types, first = layer_types_of(fields), fields.integer("max_window_layers", 28, least=0)
    window = window_of(fields, 4096) if fields.flag("use_sliding_window") else None
    count = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    slides = [i % 2 == 0 and i < first if alternate else i >= first for i in range(count)]
    return windows_by_types(types or [SLIDING if is_sliding else FULL for is_sliding in slides], window)
