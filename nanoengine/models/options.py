"""Options of the model and its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoengine.core.errors import InvalidConfig, shown
from nanoengine.core.options import check, option

QUANTIZATIONS = ("int8", "int4", "int4-128", "fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Options of the model and its files.

    Args:
        tokenizer: a folder, a hub name or "demo" with another tokenizer than the model's.
        quantization: store weights in fewer bits than the checkpoint does: "int8" (a scale for each output), "int4" (groups of 32
            inputs with a scale and a zero point), "int4-128" (groups of 128), or "fp8" (on GPUs that multiply it, with
            activations to match). None: as in the files, which may be quantized themselves.
        rope_scaling: a table that replaces `rope_scaling` in config.json, such as {"rope_type": "yarn", "factor": 4.0,
            "original_max_position_embeddings": 32768}, or the same as JSON, for contexts beyond the trained length.
        chat_template: a file with a Jinja template of chats, or the text of one, in place of all that the model has.
        model_impl: the code of the layers: "nanoengine", a family of this package; "transformers", the modules of that package
            with this engine's attention and products; "auto", the first if it knows the architecture, else the second.
    """

    tokenizer: str | Path | None = None
    quantization: str | None = option(None, choices=QUANTIZATIONS)
    rope_scaling: str | Mapping[str, Any] | None = None
    chat_template: str | Path | None = None
    model_impl: str = option("auto", choices=("auto", "nanoengine", "transformers"))

    def __post_init__(self) -> None:
        check(self)
        if self.rope_scaling is not None:  # stored as text, which can be compared and hashed
            object.__setattr__(self, "rope_scaling", json.dumps(_table(self.rope_scaling), sort_keys=True))
        if self.chat_template is not None:  # stored as text: processes on other machines have no such file
            from nanoengine.models.chat_template import read_template  # loaded for chats only

            object.__setattr__(self, "chat_template", read_template(self.chat_template))
        if not isinstance(self.tokenizer, str | Path | None):
            raise InvalidConfig(f"tokenizer is {shown(self.tokenizer)}: it must be a folder or a name")
        object.__setattr__(self, "tokenizer", self.tokenizer and str(self.tokenizer))


def _table(value: Any) -> dict[str, Any]:
    try:
        return dict(json.loads(value if isinstance(value, str) else json.dumps(dict(value))).items())
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise InvalidConfig(f"rope_scaling is {shown(value)}: it must be a table, or JSON of one: {error}") from error
