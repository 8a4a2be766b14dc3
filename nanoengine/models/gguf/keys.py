"""Keys: the keys of a GGUF file's architecture. Each is read, or without effect, or refused by name.

A key that is not translated could change what the model computes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from typing import Any

import numpy as np

from nanoengine.errors import UnsupportedModel, shown
from nanoengine.models.config_fields import log_unknown, names_of
from nanoengine.models.gguf.file import GGUFFile

REALS = (
    *("epsilon", "scale", "factor", "freq_base", "freq_base_swa", "scale_linear"),
    *("softcapping", "beta_fast", "beta_slow", "yarn_log_multiplier"),
)
"""Endings of keys whose values may be fractions."""

OF_OLLAMA = {
    "attention.head_dim": "attention.key_length",
    "rope.global.freq_base": "rope.freq_base",
    "rope.local.freq_base": "rope.freq_base_swa",
    "rope.scaling.beta_fast": "rope.scaling.yarn_beta_fast",
    "rope.scaling.beta_slow": "rope.scaling.yarn_beta_slow",
    "rope.scaling.mscale_all_dim": "rope.scaling.yarn_log_multiplier",
    "rope.scaling_beta": "attention.temperature_scale",
}
"""Names of keys in files of Ollama -> llama.cpp's."""

WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attention.causal", "expert_weights_norm", "norm_top_k_prob"), (True,)),
    **dict.fromkeys(
        ("attention.clamp_kqv", "attention.max_alibi_bias", "attention.scale", "attention.temperature_scale"), (0.0,)
    ),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (0.0,)),
    **dict.fromkeys(("attention.sliding_window", "expert_count", "expert_used_count", "expert_shared_count"), (0,)),
    "expert_shared_feed_forward_length": (0,),
    "rope.scaling.mscale": (1.0,),
    "expert_gating_func": (1,),
    "expert_weights_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
}
"""Keys that are not translated -> the values with which they change nothing."""

NOT_OF_THE_MODEL = re.compile(
    r"vocab_size|tensor_data_layout|rope\.scaling\.finetuned|pooling_type|embedding_length_out|classifier\.output_labels|"
    r"(vision|audio|mm)\..*|.*_token_(id|index)|spatial_merge_size|n_deepstack_layers|"
    r"(rope\.)?mrope_sections?|rope\.mrope_interleaved|rope\.dimension_sections"
)
"""Keys without effect on the hidden states of a text: the size of the vocabulary, which the embedding has, the conversion of the
model, outputs other than logits, and images. In a text, all positions of a token are equal.
"""

TEMPLATES = "tokenizer.chat_template."
"""The prefix of keys of further chat templates."""


class Keys:
    """The keys of a file's architecture, without its name as prefix. Every key must be read, or be without effect.

    Raises:
        UnsupportedModel: the architecture is not one of `known`.
    """

    def __init__(self, file: GGUFFile, known: Collection[str]):
        self._path, self._metadata = file.path, file.metadata
        architecture = file.metadata.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in known:
            raise UnsupportedModel(
                f"{file.path} has general.architecture {shown(architecture)}; supported are {', '.join(known)}"
            )
        self.architecture = architecture
        self._prefix = f"{self.architecture}."
        start = len(self._prefix)
        stated = {key[start:]: value for key, value in file.metadata.items() if key.startswith(self._prefix)}
        renamed = {OF_OLLAMA[key]: stated.pop(key) for key in OF_OLLAMA if key in stated}
        self._values = renamed | stated
        self._unread = set(self._values)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def number(self, key: str, default: float | None = None, *, some_have_none: bool = False) -> Any:
        """A count, or of REALS a number; of a list, the value that all layers have.

        Args:
            some_have_none: zeros in a list are left out.

        Raises:
            UnsupportedModel: another value, or layers that differ.
        """
        value = self._read(key, default)
        if isinstance(value, np.ndarray) and some_have_none and value.any():
            value = value[value != 0]
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        is_number = type(value) is int or (type(value) is float and key.endswith(REALS) and math.isfinite(value))
        if not is_number or value < 0:
            kind = "a number" if key.endswith(REALS) else "a count"
            raise self.unsupported(key, value, f"{kind}, equal in all layers")
        return value

    def expect(self, key: str, value: float, supported: str) -> None:
        """Refuse another number than this one, which is the default."""
        if (other := self.number(key, default=value)) != value:
            raise self.unsupported(key, other, supported)

    def each(self, key: str, layers: int) -> list[int]:
        """A count or a flag of each layer; the file may have one for all.

        Raises:
            UnsupportedModel: another number of values, or values that are no counts.
        """
        value = self._read(key, None)
        counts = value.tolist() if isinstance(value, np.ndarray) and len(value) == layers else value
        counts = [counts] * layers if isinstance(counts, int) else counts
        if not isinstance(counts, list) or len(counts) != layers or not all(isinstance(n, int) for n in counts):
            raise self.unsupported(key, value, f"a count of each of {layers} layers")
        return counts

    def flag(self, key: str, default: bool) -> bool:
        value = self._read(key, default)
        if not isinstance(value, bool):
            raise self.unsupported(key, value, "true or false")
        return value

    def ignore(self, start: str) -> None:
        """Mark keys with a prefix as read: they have no effect."""
        self._unread = {key for key in self._unread if not key.startswith(start)}

    def is_list(self, key: str) -> bool:
        return isinstance(self._values.get(key), np.ndarray | list)

    def text(self, key: str, default: str) -> str:
        value = self._read(key, default)
        if not isinstance(value, str):
            raise self.unsupported(key, value, "text")
        return value

    def unsupported(self, key: str, value: object, supported: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self._path} has {self._prefix}{key} {shown(value)}; supported is {supported}")

    def check_rest(self) -> None:
        """Raise UnsupportedModel if an unread key could change what the model computes. Keys that llama.cpp does not know, of
        the tokenizer too, are logged.
        """
        known = names_of("gguf")
        of_text = (key for key in self._metadata if key.startswith("tokenizer.") and not key.startswith(TEMPLATES))
        unknown = {key: self._metadata[key] for key in of_text if key not in known}
        for key in sorted(key for key in self._unread if not NOT_OF_THE_MODEL.fullmatch(key)):
            value = self._values[key]
            if key not in WITHOUT_EFFECT and key not in known:
                unknown[self._prefix + key] = value
            elif key not in WITHOUT_EFFECT:
                raise UnsupportedModel(f"{self._path} has {self._prefix}{key} {shown(value)}, which is not supported")
            elif isinstance(value, np.ndarray | list) or value not in WITHOUT_EFFECT[key]:
                raise self.unsupported(key, value, " or ".join(map(str, WITHOUT_EFFECT[key])))
        log_unknown(unknown, str(self._path))

    def _read(self, key: str, default: Any) -> Any:
        self._unread.discard(key)
        value = self._values.get(key, default)
        if value is None:
            raise UnsupportedModel(f"{self._path} has no {self._prefix}{key}: convert the model anew")
        return value
