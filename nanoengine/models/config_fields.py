"""ConfigFields: a reader of config.json that records the fields it has read, so that unread fields can be refused."""

from __future__ import annotations

import functools
import json
import logging
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from nanoengine.core.options import MAX_INT32
from nanoengine.errors import UnsupportedModel, shown

logger = logging.getLogger("nanoengine")

NAMES_FILE = Path(__file__).parent / "field_names.json"
"""Names of fields in other projects: transformers' classes of the families here, quantizers, peft, llama.cpp."""

NAMED_IN_THE_LOG = 5

WITHOUT_EFFECT = re.compile(
    r"_(name_or_path|commit_hash|from_auto)|architectures|model_type|.*_token_id|.*(dropout|_pdrop|jitter_noise)|initializer_range|"
    r".*_implementation.*|.*loss_coef|output_(attentions|hidden_states|router_logits)|return_dict|use_cache|auto_map|pretraining_tp|"
    r"(transformers|unsloth|mlx).*|is_(encoder_decoder|llama_config)|chunk_size_feed_forward|id2label|label2id|problem_type|"
    # of images and audio
    r"(vision|audio)_config|(boi|eoi|image|video|audio)_token_index|mm_tokens_per_image|spatial_merge_size|vision_feature_.*|"
    r"multimodal_projector_bias|projector_hidden_act"
)
"""Fields that are read or widespread, and do not change the outputs of a model."""

MAX_POSITIONS = 2**24
"""Limit of the longest sequence in tokens: tables have an entry for each block. A file with more is broken or hostile."""

MAX_LAYERS = 4096
REQUIRED = object()
OFF: tuple[object, ...] = (None, False, 0, "", [], {})


class UnsupportedArchitecture(UnsupportedModel):
    """No family reads the config.json of this architecture."""


class ConfigFields:
    """Reader of the fields of a table; `refuse_others` refuses an unread field that may matter.

    Args:
        table: the content of a config.json, or of a table in it.
        where: its name in messages.

    Raises:
        UnsupportedModel: by every method, for a value that is missing or wrong; the message names field, value and valid values.
    """

    def __init__(self, table: Mapping[str, Any], where: str = "the model's config.json"):
        self.table, self.where = table, where
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self.table

    def has_read(self, key: str) -> bool:
        return key in self._read

    def default(self, **values: Any) -> None:
        """Set the values of fields that are missing or null."""
        stated = {key: value for key, value in self.table.items() if value is not None}
        self.table = {**self.table, **values, **stated}

    def get(self, key: str, default: Any = None) -> Any:
        """The value in the file; `default` if it is missing or null."""
        self._read.add(key)
        value = self.table.get(key)
        return default if value is None else value

    def wrong(self, key: str, value: object, why: str) -> UnsupportedModel:
        return UnsupportedModel(f"{key} is {shown(value)} in {self.where}: {why}")

    def ignore(self, *keys: str) -> None:
        """Mark fields as read: they have no effect."""
        self._read.update(keys)

    def refuse(self, key: str, why: str) -> None:
        """Refuse a field that is not off."""
        if (value := self.get(key)) not in OFF:
            raise self.wrong(key, value, why)

    def integer(self, key: str, default: Any = REQUIRED, most: int = MAX_INT32, least: int = 1) -> int:
        """An integer within bounds, by default a positive one."""
        value = self.get(key, default if default is not REQUIRED else None)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            kind = "a positive integer" if least == 1 else f"an integer from {least} on"
            raise self.wrong(key, value, f"it must be {kind}, at most {most}")
        return value

    def nullable(self, key: str, default: Any, read: Callable[[str], Any]) -> Any:
        """`default` if the field is missing, None if it is null, else what `read` makes of it."""
        if key not in self:
            return default
        return None if self.get(key) is None else read(key)

    def number(self, key: str, default: Any = REQUIRED, least: float = 0.0, most: float = sys.float_info.max) -> float:
        """A positive number within bounds; null is wrong."""
        self._read.add(key)
        value = self.table.get(key, None if default is REQUIRED else default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise self.wrong(key, value, "it must be a positive number")
        if not least <= value <= most:
            raise self.wrong(key, value, f"it must be from {least:g} to {most:g}")
        return float(value)

    def numbers(self, key: str, count: int, least: float, most: float) -> tuple[float, ...]:
        """A list of `count` positive numbers."""
        values = self.get(key)
        if not isinstance(values, list) or len(values) != count:
            raise self.wrong(key, values, f"it must be a list of {count} numbers")
        return tuple(ConfigFields({key: value}, self.where).number(key, REQUIRED, least, most) for value in values)

    def layers(self, key: str, default: Iterable[int] = ()) -> set[int]:
        """A list of numbers of layers."""
        value = self.get(key, list(default))
        if not isinstance(value, list) or not all(isinstance(layer, int) for layer in value):
            raise self.wrong(key, value, "it must be a list of layers")
        return set(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if value not in (False, True):
            raise self.wrong(key, value, "it must be true or false")
        return bool(value)

    def table_of(self, key: str) -> Mapping[str, Any]:
        """A table; an empty one if there is none."""
        value = self.get(key) or {}
        if not isinstance(value, Mapping):
            raise self.wrong(key, value, "it must be a table")
        return value

    def expect(self, key: str, *supported: object) -> None:
        """Refuse other values of a field than the supported ones."""
        value = self.get(key)
        if value is not None and value not in supported:
            raise UnsupportedModel(f"{key} is {shown(value)}: only {' or '.join(map(repr, supported))} is supported")

    def refuse_others(self, known: Collection[str] | None = None) -> None:
        """Refuse unread fields, unless they have no effect or are off.

        Args:
            known: fields of other projects, which are refused; others are logged. None: all are refused.
        """
        others = {key: value for key, value in self.table.items() if key not in self._read and value not in OFF}
        unread = {key: value for key, value in others.items() if not WITHOUT_EFFECT.fullmatch(key)}
        for key, value in unread.items():
            if known is None or key in known:
                raise UnsupportedModel(
                    f"{shown(key)} is {shown(value)} in {self.where}: this field is not known, and might change what the model "
                    "computes; take it out if it does not"
                )
        log_unknown(unread, self.where)


@functools.cache
def _tables() -> dict[str, dict[str, list[str]]]:
    return json.loads(NAMES_FILE.read_text())


def names_of(kind: str, model_type: object = None) -> frozenset[str]:
    """Names in other projects: of a "model" of a type (of all types if it has no family), "quantization", "adapter", "gguf"."""
    tables = _tables()[kind]
    family = model_type.removesuffix("_text") if isinstance(model_type, str) else ""
    return frozenset(name for key in (("", family) if family and family in tables else tables) for name in tables[key])


def log_unknown(fields: Mapping[str, Any], where: str) -> None:
    """Log the first of the fields that are not known."""
    first = [f"{shown(key)} ({shown(value)})" for key, value in fields.items()][:NAMED_IN_THE_LOG]
    if first:
        more = f" and {len(fields) - len(first)} more" if len(fields) > len(first) else ""
        _log_once(where, ", ".join(first) + more)


@functools.lru_cache(maxsize=64)
def _log_once(where: str, named: str) -> None:
    logger.warning("%s has %s, which are not known fields: ignored", where, named)
