"""The reader of a config.json: the family of its architecture, and checks of the fields and sizes of all families."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from nanoengine.errors import UnsupportedModel, shown
from nanoengine.models import families
from nanoengine.models.config_fields import MAX_POSITIONS, ConfigFields, UnsupportedArchitecture, names_of
from nanoengine.models.families.windows import layer_types_of
from nanoengine.models.model_config import ModelConfig
from nanoengine.models.quantization.scheme import QUANTIZATION, read_scheme
from nanoengine.models.rope_config import scaled_length, with_rope_scaling

LENGTHS = (
    *("n_positions", "n_ctx", "seq_length", "seq_len", "model_max_length"),
    *("max_seq_len", "max_seq_length", "max_sequence_length", "max_target_positions"),
)
"""Other names of max_position_embeddings, for example in the first files of LLaMA. The smallest counts, as in vLLM."""

OTHER_TENSORS = ("sarvam_moe",)
"""Model types with other names of tensors than their architecture."""

MAX_WEIGHTS = 2**44
"""Limit of the weights of one matrix: sizes of tensors in bytes stay far below 64 bits."""

FAMILIES = [import_module(f"{families.__name__}.{module.name}") for module in iter_modules(families.__path__)]
"""All modules of `families/`; a family has ARCHITECTURES and read_config, and the others are its helpers."""

ARCHITECTURES = {name: family for family in FAMILIES for name in getattr(family, "ARCHITECTURES", ())}


def read_model_config(
    table: Mapping[str, Any], rope_scaling: Mapping[str, Any] | None = None, plugins: Sequence[Any] = ()
) -> ModelConfig:
    """The model of a Hugging Face config.json, in the schema of transformers 4 or 5.

    Args:
        table: the content of the file.
        rope_scaling: replaces that of the file.
        plugins: further families, which have precedence.

    Raises:
        UnsupportedModel: an architecture or a feature that is not computed; a field that is missing, wrong or not known.
    """
    stated, text = table.get("architectures"), text_table(table)
    names = stated if isinstance(stated, list) else []
    # LlamaModel has no head, the first files say LLaMA, and some files have a model_type instead.
    full = [re.sub("Model$", "ForCausalLM", name) for name in names if isinstance(name, str)]
    if stated is None and isinstance(kind := text.get("model_type"), str):
        full = [kind.removesuffix("_text") + "ForCausalLM"]
    known = ARCHITECTURES | {name: family for family in plugins for name in family.ARCHITECTURES}
    spellings = {name.replace("_", "").lower(): name for name in known}
    spelled = (spellings.get(name.replace("_", "").lower()) for name in full)
    architecture = next(filter(None, spelled), None)
    if architecture is None or text.get("model_type") in OTHER_TENSORS:
        are_names = bool(full) and (stated is None or len(full) == len(names))
        why = "none of them is supported" if are_names else "it must be a list of names"
        kind = UnsupportedArchitecture if are_names else UnsupportedModel
        raise kind(f"architectures is {shown(stated)}: {why}; supported are {', '.join(sorted(known))}")
    fields = ConfigFields(text if rope_scaling is None else with_rope_scaling(text, rope_scaling))
    lengths = [fields.integer(key) for key in LENGTHS if fields.get(key) is not None]
    fields.default(max_position_embeddings=min(lengths, default=None))
    config = known[architecture].read_config(fields, architecture)
    _check_sizes(fields, config)
    longest = min([config.max_position_embeddings, *lengths])
    if not config.positions_are_scaled:
        longest = scaled_length(longest, [layer.rope for layer in config.layers if layer.rope is not None])
    config = replace(config, architecture=architecture, max_position_embeddings=min(longest, MAX_POSITIONS))
    if not fields.has_read("layer_types"):
        layer_types_of(fields)
    why = "MLX's packing is not read; give a folder in bfloat16, float16 or float32, or a GGUF file"
    fields.refuse("quantization", why)
    scheme = read_scheme(table)
    is_mxfp4 = config.experts is not None and config.experts.is_mxfp4
    if scheme is not None and (scheme.layout == "mxfp4") is not is_mxfp4:
        why = "MXFP4 is read of gpt-oss alone, and of gpt-oss nothing else"
        raise fields.wrong(QUANTIZATION, table[QUANTIZATION], why)
    fields.expect("is_causal", True)
    # Windows have no effect where a family does not read them; quantization describes the files, not the model.
    fields.ignore("sliding_window", "max_window_layers", QUANTIZATION, "compression_config")
    fields.refuse_others(names_of("model", fields.get("model_type")))
    return config


def _check_sizes(fields: ConfigFields, config: ModelConfig) -> None:
    """Raises UnsupportedModel if a matrix has more than `MAX_WEIGHTS` weights."""
    rows = [config.vocab_size, 2 * config.num_heads * config.head_dims[-1], config.num_layers * config.per_layer_size]
    rows += [2 * (layer.intermediate_size or config.intermediate_size) for layer in config.layers]
    if config.experts is not None:
        rows += [2 * config.experts.num_experts * config.experts.intermediate_size, 2 * config.experts.shared_size]
    if config.states is not None:
        rows += [2 * config.states.channels]
    of_all_layers = config.vocab_size * config.num_layers * config.per_layer_size
    if (most := max(config.hidden_size * max(rows), of_all_layers)) > MAX_WEIGHTS:
        raise UnsupportedModel(f"sizes in {fields.where} make a matrix of {most} weights: at most {MAX_WEIGHTS} can be")


def text_table(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """The table of the text part, if the config.json is of a multimodal model."""
    text = table.get("text_config")
    if not isinstance(text, Mapping) or not text:
        return table
    outer = {key: table[key] for key in ("architectures", "tie_word_embeddings") if table.get(key) is not None}
    return {**{key: value for key, value in table.items() if key != "text_config"}, **text, **outer}
