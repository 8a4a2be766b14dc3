"""gpt-oss (OpenAI, 2025): sinks, windows in every other layer, biases everywhere, and experts with a clamped gate."""

from __future__ import annotations

from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families.common import activation_of, biases_of, read_decoder
from nanoengine.models.families.windows import types_by_pattern, window_of, windows_by_types
from nanoengine.models.model_config import ExpertsConfig, ModelConfig, TensorNames

ARCHITECTURES = ("GptOssForCausalLM",)
NAMES = TensorNames(router="router", expert_gate_up_down=("gate_up_proj", "down_proj"))
ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
"""How heads are rotated where the file says nothing."""


def read_config(fields: ConfigFields, architecture: str) -> ModelConfig:
    activation_of(fields, "hidden_act", "silu")
    fields.expect("swiglu_alpha", 1.702)
    fields.expect("swiglu_limit", 7.0)
    fields.ignore("experts_per_token", "initial_context_length")  # beside the names that count
    if not fields.get("rope_scaling"):
        fields.default("rope_parameters", ROPE)
    count = fields.integer("num_local_experts", 128)
    experts = ExpertsConfig(
        num_experts=count,
        num_chosen=fields.integer("num_experts_per_tok", 4, most=count),
        intermediate_size=fields.integer("intermediate_size"),
        normalize=True,
        has_biases=True,
    )
    return read_decoder(
        fields,
        architecture,
        head_dim=64,
        eps=1e-5,
        theta=150_000.0,
        windows=windows_by_types(types_by_pattern(fields, 2), window_of(fields, 128)),
        experts=experts,
        activation="clamped",
        has_sinks=True,
        **biases_of(fields, True),
        names=TensorNames() if fields.flag("linears_are_split") else NAMES,
    )
