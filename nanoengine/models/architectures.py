"""Which family reads the config.json of which architecture."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from nanoengine.errors import UnsupportedModel, shown
from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families import (
    gemma,
    gpt_oss,
    granite,
    granite_hybrid,
    lfm2,
    llama,
    llama4,
    mistral,
    olmo,
    phi3,
    qwen,
    qwen3_next,
    smollm3,
)
from nanoengine.models.families.windows import layer_types_of
from nanoengine.models.model_config import ModelConfig
from nanoengine.quantization.scheme import QUANTIZATION, read_scheme

FAMILIES = (
    llama,
    mistral,
    qwen,
    smollm3,
    phi3,
    granite,
    olmo,
    gemma,
    gpt_oss,
    lfm2,
    qwen3_next,
    granite_hybrid,
    llama4,
)
ARCHITECTURES = {name: family for family in FAMILIES for name in family.ARCHITECTURES}


def read_model_config(table: Mapping[str, Any]) -> ModelConfig:
    """What a Hugging Face config.json (schemas of transformers 4 and 5) says of a model.

    Raises:
        UnsupportedModel: an architecture or a feature that is not computed, a field that is missing, wrong or not known.
    """
    stated = table.get("architectures")
    names = stated if isinstance(stated, list) else []
    full = (re.sub("Model$", "ForCausalLM", name) for name in names if isinstance(name, str))  # LlamaModel has no head
    architecture = next((name for name in full if name in ARCHITECTURES), None)
    if architecture is None:
        what = "none of them is supported" if names else "it must be a list of names"
        raise UnsupportedModel(
            f"architectures is {shown(stated)}: {what}; supported are {', '.join(sorted(ARCHITECTURES))}"
        )
    fields = ConfigFields(text_table(table))
    config = ARCHITECTURES[architecture].read_config(fields, architecture)
    if config.states is None and not config.has_chunks:
        layer_types_of(fields)
    scheme = read_scheme(table)
    if scheme is not None and (scheme.layout == "mxfp4") is not (ARCHITECTURES[architecture] is gpt_oss):
        raise fields.wrong(
            QUANTIZATION, table[QUANTIZATION], "MXFP4 is read of gpt-oss alone, and of gpt-oss nothing else"
        )
    fields.expect("is_causal", True)
    # Where a family does not read windows, they are of no effect; and how files hold weights is not what the model is.
    fields.ignore("sliding_window", "max_window_layers", QUANTIZATION)
    fields.refuse_others()
    return config


def text_table(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the config.json of a model that sees pictures, too, says of its part for text."""
    text = table.get("text_config")
    if not isinstance(text, Mapping) or not text:
        return table
    others = {key: value for key, value in table.items() if key not in ("text_config", "vision_config")}
    return {**others, **text, "architectures": table.get("architectures")}
