"""dots.llm1 (rednote, 2025): the attention of Qwen 3; after the first layers, experts beside an MLP of all tokens."""

from __future__ import annotations

from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families.common import biases_of, head_dim_of, read_decoder
from nanoengine.models.families.routed import SHARED, routed_experts, sparse_after, with_experts
from nanoengine.models.families.windows import FULL, SLIDING, layer_types_of, layers_by_types, window_of
from nanoengine.models.model_config import ModelConfig, TensorNames
from nanoengine.models.rope_config import LAYER_TYPES, read_rope

ARCHITECTURES = ("Dots1ForCausalLM",)


def read_config(fields: ConfigFields, _architecture: str) -> ModelConfig:
    sparse, first = sparse_after(fields, "first_k_dense_replace", 0), fields.integer("max_window_layers", 62)
    types = layer_types_of(fields) or [SLIDING if number >= first else FULL for number in range(len(sparse))]
    ropes = dict.fromkeys(LAYER_TYPES, read_rope(fields, head_dim_of(fields)))
    return read_decoder(
        fields,
        layers=with_experts(layers_by_types(types, ropes, window_of(fields, 4096)), sparse),
        experts=routed_experts(fields, "n_routed_experts", added_to_sum=1e-20),
        qk_norm="head",
        names=TensorNames(replaced=(SHARED,)),
        **biases_of(fields),
    )
