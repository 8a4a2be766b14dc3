"""Which family reads the config.json of which architecture."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nanoengine.errors import UnsupportedModel, shown
from nanoengine.models.config_fields import MAX_POSITIONS, ConfigFields, UnsupportedArchitecture, names_of
from nanoengine.models.families import (
    bamba,
    dots1,
    ernie,
    ernie4_5_moe,
    exaone4,
    falcon_h1,
    gemma,
    gemma4,
    glm,
    glm4_moe,
    gpt_oss,
    granite,
    granite_hybrid,
    hunyuan,
    lfm2,
    llama,
    llama4,
    minimax_m2,
    mistral,
    nemotron_h,
    olmo,
    phi3,
    qwen,
    qwen3_next,
    qwen_vl,
    seed_oss,
    smollm3,
)
from nanoengine.models.families.windows import layer_types_of
from nanoengine.models.model_config import ModelConfig
from nanoengine.models.quantization.scheme import QUANTIZATION, read_scheme
from nanoengine.models.rope_config import reach, rescaled

FAMILIES = (
    llama,
    mistral,
    qwen,
    smollm3,
    phi3,
    granite,
    olmo,
    gemma,
    gemma4,
    gpt_oss,
    lfm2,
    qwen3_next,
    qwen_vl,
    granite_hybrid,
    bamba,
    falcon_h1,
    nemotron_h,
    llama4,
    seed_oss,
    glm,
    exaone4,
    ernie,
    hunyuan,
    glm4_moe,
    minimax_m2,
    ernie4_5_moe,
    dots1,
)
LENGTHS = (
    *("n_positions", "n_ctx", "seq_length", "seq_len", "model_max_length"),
    *("max_seq_len", "max_seq_length", "max_sequence_length", "max_target_positions"),
)
"""Other names of max_position_embeddings, such as the first files of LLaMA have. The smallest counts, as vLLM has it."""

OTHER_TENSORS = ("sarvam_moe",)
"""Model types whose tensors have other names than those of the architecture."""

MAX_WEIGHTS = 2**44
"""Of one matrix: beyond it the sizes of tensors in bytes come near to what 64 bits can say."""

ARCHITECTURES = {name: family for family in FAMILIES for name in family.ARCHITECTURES}


def read_model_config(
    table: Mapping[str, Any], rope_scaling: Mapping[str, Any] | None = None, plugins: Sequence[Any] = ()
) -> ModelConfig:
    """What a Hugging Face config.json (schemas of transformers 4 and 5) says of a model, with `rope_scaling` in place of its own,
    and with families beside ours, which come first.

    Raises:
        UnsupportedModel: an architecture or a feature that is not computed, a field that is missing, wrong or not known.
    """
    stated = table.get("architectures")
    names = stated if isinstance(stated, list) else []
    # LlamaModel has no head, and the first files say LLaMA; some have a model_type alone, which is the same word.
    full = [re.sub("Model$", "ForCausalLM", name) for name in names if isinstance(name, str)]
    if stated is None and isinstance(kind := text_table(table).get("model_type"), str):
        full = [kind.removesuffix("_text") + "ForCausalLM"]
    known = ARCHITECTURES | {name: family for family in plugins for name in family.ARCHITECTURES}
    spellings = {name.replace("_", "").lower(): name for name in known}
    spelled = (spellings.get(name.replace("_", "").lower()) for name in full)
    architecture = next(filter(None, spelled), None)
    if architecture is None or text_table(table).get("model_type") in OTHER_TENSORS:
        are_names = bool(full) and (stated is None or len(full) == len(names))
        what = "none of them is supported" if are_names else "it must be a list of names"
        kind = UnsupportedArchitecture if are_names else UnsupportedModel
        raise kind(f"architectures is {shown(stated)}: {what}; supported are {', '.join(sorted(known))}")
    fields = ConfigFields(text_table(table) if rope_scaling is None else rescaled(text_table(table), rope_scaling))
    lengths = [fields.integer(key) for key in LENGTHS if fields.get(key) is not None]
    fields.default("max_position_embeddings", min(lengths, default=None))
    config = known[architecture].read_config(fields, architecture)
    _check_sizes(fields, config)
    longest = min([config.max_position_embeddings, *lengths])
    if not architecture.startswith("Gemma3"):  # whose length is that of the stretched positions
        longest = reach(longest, [layer.rope for layer in config.layers if layer.rope is not None])
    config = replace(config, max_position_embeddings=min(longest, MAX_POSITIONS))
    if not fields.has_read("layer_types"):
        layer_types_of(fields)
    fields.refuse(
        "quantization", "MLX's packing is not read; give a folder in bfloat16, float16 or float32, or a GGUF file"
    )
    scheme = read_scheme(table)
    if scheme is not None and (scheme.layout == "mxfp4") is not (known[architecture] is gpt_oss):
        raise fields.wrong(
            QUANTIZATION, table[QUANTIZATION], "MXFP4 is read of gpt-oss alone, and of gpt-oss nothing else"
        )
    fields.expect("is_causal", True)
    # Where a family does not read windows, they are of no effect; and how files hold weights is not what the model is.
    fields.ignore("sliding_window", "max_window_layers", QUANTIZATION, "compression_config")
    fields.refuse_others(names_of("model", fields.get("model_type")))
    return config


def _check_sizes(fields: ConfigFields, config: ModelConfig) -> None:
    """UnsupportedModel if a matrix is so large that its size cannot be computed with 64 bits."""
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
    """The table for the text part, in the config.json of a model that sees pictures, too."""
    text = table.get("text_config")
    if not isinstance(text, Mapping) or not text:
        return table
    outer = {key: table[key] for key in ("architectures", "tie_word_embeddings") if table.get(key) is not None}
    return {**{key: value for key, value in table.items() if key != "text_config"}, **text, **outer}
