"""Tiny random checkpoints of every text-generation architecture of the installed transformers."""

from __future__ import annotations

import json
import re
import shutil
import zlib
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import nanoengine
from benchmarks.architectures.sizes import LAYERS, OVERRIDES, SIZES

MOST_PARAMETERS = 60_000_000
NOT_IN_THE_TABLE = {"mistral4": "Mistral4ForCausalLM"}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
AS_MADE = re.compile(r"A_log|dt_bias|dt_proj|gate_preact|\.D$|conv1d|inv_freq")
ROUTER_BIAS = re.compile(r"e_score_correction|expert_bias")


def names() -> list[str]:
    """A name is that of the class; `Class:model_type` where it serves the model_type of another config, too."""
    found = []
    for model_type, classes in {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **NOT_IN_THE_TABLE}.items():
        for name in (classes,) if isinstance(classes, str) else classes:
            main = getattr(transformers, name).config_class.model_type == model_type
            found.append(name if main else f"{name}:{model_type}")
    return sorted(found)


def make(name: str, folder: Path) -> None:
    """Write config.json, model.safetensors and a tokenizer; the same ones every time.

    Raises:
        Exception: transformers cannot make the model of these sizes.
    """
    class_name, _, model_type = name.partition(":")
    model_class = getattr(transformers, class_name)
    config_class = CONFIG_MAPPING[model_type] if model_type else model_class.config_class
    config = config_class(**sizes(config_class, name))
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    torch.manual_seed(zlib.crc32(name.encode()))
    inner = config if isinstance(config, model_class.config_class) else config.get_text_config(decoder=True)
    inner._attn_implementation = "eager"
    model = model_class(inner).float().eval()
    if (count := sum(each.numel() for each in model.parameters())) > MOST_PARAMETERS:
        raise ValueError(f"{count} parameters")
    randomize(model)
    model.save_pretrained(folder)
    if inner is not config:
        table = config.to_dict() | {"architectures": [class_name], "dtype": "float32"}
        (folder / "config.json").write_text(json.dumps(table))
    for file in TOKENIZER:
        shutil.copy(Path(nanoengine.__file__).parent / "demo" / file, folder / file)


def sizes(config_class: Any, name: str) -> dict[str, Any]:
    """Arguments of a config: small sizes, and each type of layer that the default has."""
    base = config_class()
    known = {field.name for field in fields(config_class)}
    known |= {config_class.attribute_map.get(key, key) for key in known}
    table = {key: value for key, value in base.to_dict().items() if key in known}
    found: dict[str, Any] = {key: size for key, size in SIZES.items() if table.get(key) is not None}
    if table.get("num_key_value_heads", 0) == table.get("num_attention_heads"):
        found["num_key_value_heads"] = found["num_attention_heads"]
    depth = getattr(base, "num_hidden_layers", 0)
    for key, value in table.items():
        if isinstance(value, list) and len(value) == depth and set(map(type, value)) == {str}:
            kinds = list(dict.fromkeys(value))
            found[key] = (kinds * LAYERS)[:LAYERS]
    for key in getattr(config_class, "sub_configs", None) or {}:
        if (part := getattr(base, key, None)) is not None and not isinstance(part, dict):
            found[key] = sizes(type(part), f"{name}/{key}")
            found[key]["model_type"] = part.model_type
    return found | OVERRIDES.get(name, {})


def randomize(model: torch.nn.Module) -> None:
    """Weights of a model whose errors show: no scale is 1, no bias is 0, and the logits differ."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not weight.is_floating_point() or AS_MADE.search(name):
                continue
            if name.endswith("bias"):
                weight.normal_(0, 0.3)
            elif weight.dim() < 2:
                part = torch.empty_like(weight).uniform_(-0.5, 0.5)
                weight.copy_(torch.where(weight == 0, part, weight * (1 + part)))
            else:
                weight.normal_(0, 1.3 * weight.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if ROUTER_BIAS.search(name):
                buffer.normal_(0, 0.2)
