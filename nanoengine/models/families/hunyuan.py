"""Hunyuan, dense (Tencent, 2025): Llama with QK norms after the rotation."""

from __future__ import annotations

from nanoengine.models.config_fields import REQUIRED, ConfigFields
from nanoengine.models.families.common import biases_of, head_dim_of, read_decoder
from nanoengine.models.model_config import ModelConfig, TensorNames
from nanoengine.models.rope_config import SCALES, remove_keys

ARCHITECTURES = ("HunYuanDenseV1ForCausalLM",)
NAMES = TensorNames(replaced=((".q_norm.", ".query_layernorm."), (".k_norm.", ".key_layernorm.")))


def read_config(fields: ConfigFields, _architecture: str) -> ModelConfig:
    for key in ("use_cla", "position_embedding_xdrope"):
        fields.expect(key, False)
    fields.expect("use_qk_norm", True)
    fields.expect("norm_type", "rms")
    fields.ignore("attention_head_dim", "cla_share_factor", "class_num", "dense_list", "org_vocab_size", "pad_id")
    fields.ignore(
        "mask_init_id", "im_start_id", "im_end_id", "im_newline_id", "text_start_id", "text_end_id", "pool_type"
    )
    _stretch(fields, head_dim_of(fields))
    return read_decoder(fields, eps=1e-5, qk_norm="late", names=NAMES, **biases_of(fields))


def _stretch(fields: ConfigFields, size: int) -> None:
    """Replace a "dynamic" rotation with an alpha by a rotation with a larger base, for all lengths."""
    for key in ("rope_scaling", "rope_parameters"):
        rotation = ConfigFields(fields.table_of(key), f"{key} of {fields.where}")
        if rotation.get("alpha") is None or rotation.get("rope_type", rotation.get("type")) != "dynamic":
            continue
        theta = rotation.number("rope_theta", fields.number("rope_theta", 10_000.0))
        if size > 2:
            theta *= rotation.number("alpha", REQUIRED, *SCALES) ** (size / (size - 2))
        remove_keys(fields, "alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "type", "factor")
        fields.table = {**fields.table, key: {**fields.table_of(key), "rope_type": "default", "rope_theta": theta}}
