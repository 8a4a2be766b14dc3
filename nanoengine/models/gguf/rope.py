"""RoPE: the rope_parameters of a config.json, from the metadata of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from nanoengine.errors import InvalidWeights
from nanoengine.models.gguf.file import GGUFFile
from nanoengine.models.gguf.keys import Keys
from nanoengine.models.gguf.tensor_names import ROPE_FACTORS, ROPE_LONG, ROPE_SHORT

EPSILON = "attention.layer_norm_rms_epsilon"


def rope_parameters(file: GGUFFile, keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of all layers, or of each type where layers with a window are not scaled.

    Raises:
        UnsupportedModel: a kind of scaling, or a value of it, that is not computed.
        InvalidWeights: tensors of factors that are misshapen, or not positive.
    """
    name = config["architectures"][0]
    if name == "Gemma3ForCausalLM":
        theta = keys.number("rope.freq_base_swa", default=10_000.0)
        full = _of_all(file, keys, config, 1e6)
    elif name == "Olmo3ForCausalLM":
        full = _of_all(file, keys, config)
        theta = keys.number("rope.freq_base_swa", default=full["rope_theta"])
    else:
        return _of_all(file, keys, config)
    local = {"rope_type": "default", "rope_theta": float(theta)}
    return {"full_attention": full, "sliding_attention": local}


def _of_all(file: GGUFFile, keys: Keys, config: Mapping[str, Any], theta: float = 10_000.0) -> dict[str, Any]:
    name, size = config["architectures"][0], config["head_dim"]
    rotated = keys.number("rope.dimension_count", default=size)
    if rotated > size or rotated % 2:
        raise keys.unsupported("rope.dimension_count", rotated, f"an even number up to the size of a head, {size}")
    rope: dict[str, Any] = {"rope_theta": float(keys.number("rope.freq_base", default=theta))}
    if rotated < size:
        rope["partial_rotary_factor"] = partial_factor(rotated, size)
    is_gpt_oss = name == "GptOssForCausalLM"
    kind = keys.text("rope.scaling.type", default="yarn" if is_gpt_oss else "linear")
    unsaid = keys.number("rope.scale_linear", default=0.0)
    if name == "Gemma3ForCausalLM" and EPSILON not in keys and config["max_position_embeddings"] >= 131_072:
        unsaid = 8.0  # Ollama's files of those that see pictures say neither
    factor = keys.number("rope.scaling.factor", default=unsaid) or 1.0
    original = keys.number("rope.scaling.original_context_length", default=config["max_position_embeddings"])
    attention = keys.number("rope.scaling.attn_factor", default=1.0)
    if {ROPE_LONG, ROPE_SHORT} <= file.tensors.keys() and ROPE_FACTORS not in file.tensors and factor == 1.0:
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": original}
        rope |= {
            "long_factor": divisors(file, ROPE_LONG, rotated),
            "short_factor": divisors(file, ROPE_SHORT, rotated),
        }
        return rope | ({"attention_factor": attention} if "rope.scaling.attn_factor" in keys else {})
    is_olmo3 = name == "Olmo3ForCausalLM"  # whose files have Hugging Face's factor there
    if attention != 1.0 and not is_olmo3:
        raise keys.unsupported("rope.scaling.attn_factor", attention, "1.0 without long and short factors")
    if ROPE_FACTORS in file.tensors and (factor == 1.0 or kind == "none"):
        return rope | {"rope_type": "factors", "factors": divisors(file, ROPE_FACTORS, rotated)}
    if any(name in file.tensors for name in (ROPE_FACTORS, ROPE_LONG, ROPE_SHORT)):
        raise keys.unsupported(
            "rope.scaling.factor", factor, "1.0 beside factors of each frequency, and of both lengths"
        )
    yarn = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow", "attention_factor": "yarn_attn_factor"}
    yarn_fields = {
        field: keys.number(f"rope.scaling.{key}") for field, key in yarn.items() if f"rope.scaling.{key}" in keys
    }
    if (mscale := keys.number("rope.scaling.yarn_log_multiplier", default=0.0)) > 0.0:
        yarn_fields |= {"mscale": 1.0, "mscale_all_dim": mscale}
    if is_gpt_oss:
        yarn_fields["truncate"] = False
    if is_olmo3 and "rope.scaling.attn_factor" in keys:
        yarn_fields["attention_factor"] = attention
    if kind not in ("none", "linear", "yarn"):
        raise keys.unsupported("rope.scaling.type", kind, "none, linear, yarn, or longrope with its factors")
    if factor == 1.0 or kind == "none":
        return rope | {"rope_type": "default"}
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": factor}
    return rope | {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original} | yarn_fields


def partial_factor(rotated: int, size: int) -> float:
    """The part of a head that is rotated; times `size`, the quotient itself may round to less than `rotated`."""
    ratio = rotated / size
    return ratio if int(size * ratio) == rotated else math.nextafter(ratio, 1.0)


def divisors(file: GGUFFile, name: str, rotated: int) -> list[float]:
    """The divisor of each frequency in a tensor; InvalidWeights if it has another shape, or numbers that divide none."""
    record = file.tensors[name]
    if (record.type, record.shape) != ("F32", (rotated // 2,)):
        raise InvalidWeights(f"{file.path} has {name} as {record.type} {list(record.shape)}, not F32 [{rotated // 2}]")
    divisors = file.data(name).view("<f4")
    if not (np.isfinite(divisors) & (divisors > 0)).all():
        raise InvalidWeights(f"{file.path} has {name} with numbers that divide no frequency: fetch it again")
    return divisors.tolist()
