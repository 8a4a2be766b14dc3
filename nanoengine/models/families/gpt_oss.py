"""gpt-oss (OpenAI, 2025): sinks, windows in every other layer, biases everywhere, and experts with a clamped gate."""

from __future__ import annotations

from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families.common import biases_of, read_decoder
from nanoengine.models.families.routed import local_experts
from nanoengine.models.families.windows import types_by_pattern, window_of, windows_by_types
from nanoengine.models.model_config import ModelConfig, TensorNames

ARCHITECTURES = ("GptOssForCausalLM",)
NAMES = TensorNames(router="router", expert_gate_up_down=("gate_up_proj", "down_proj"))
ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
"""Default of `rope_parameters`."""


def read_config(fields: ConfigFields, _architecture: str) -> ModelConfig:
    fields.expect("hidden_act", "silu")
    fields.expect("swiglu_alpha", 1.702)
    fields.expect("swiglu_limit", 7.0)
    fields.ignore("experts_per_token", "initial_context_length")  # older names of other fields
    if not fields.get("rope_scaling"):
        fields.default(rope_parameters=ROPE)
    return read_decoder(
        fields,
        head_dim=64,
        eps=1e-5,
        theta=150_000.0,
        windows=windows_by_types(types_by_pattern(fields, 2), window_of(fields, 128)),
        experts=local_experts(fields, 128, 4, has_biases=True, is_mxfp4=True),
        activation="clamped",
        has_sinks=True,
        **biases_of(fields, True),
        names=TensorNames() if fields.flag("linears_are_split") else NAMES,
    )
