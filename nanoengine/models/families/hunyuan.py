"""Hunyuan, dense (Tencent, 2025): Llama with norms over each head of q and k behind the rotation."""

from __future__ import annotations

from nanoengine.models.config_fields import REQUIRED, ConfigFields
from nanoengine.models.families.common import biases_of, head_dim_of, read_decoder
from nanoengine.models.model_config import ModelConfig, TensorNames
from nanoengine.models.rope_config import SCALES, take_out

ARCHITECTURES = ("HunYuanDenseV1ForCausalLM",)
NAMES = TensorNames(replaced=((".q_norm.", ".query_layernorm."), (".k_norm.", ".key_layernorm.")))


def read_config(fields: ConfigFields, architecture: str) -> ModelConfig:
    for key, only in (
        ("use_qk_norm", True),
        ("use_cla", False),
        ("position_embedding_xdrope", False),
        ("norm_type", "rms"),
    ):
        fields.expect(key, only)
    fields.ignore(
        "attention_head_dim", "cla_share_factor", "class_num", "dense_list", "org_vocab_size", "pad_id", "pool_type"
    )
    fields.ignore("mask_init_id", "im_start_id", "im_end_id", "im_newline_id", "text_start_id", "text_end_id")
    _stretch(fields, head_dim_of(fields))
    return read_decoder(fields, architecture, eps=1e-5, qk_norm="late", names=NAMES, **biases_of(fields))


def _stretch(fields: ConfigFields, size: int) -> None:
    """A rotation that is called "dynamic" and has an alpha is one of a larger base, for all lengths."""
    for key in ("rope_scaling", "rope_parameters"):
        own = ConfigFields(fields.table_of(key), f"{key} of {fields.where}")
        if own.get("alpha") is None or own.get("rope_type", own.get("type")) != "dynamic":
            continue
        theta = own.number("rope_theta", fields.number("rope_theta", 10_000.0))
        if size > 2:
            theta *= own.number("alpha", REQUIRED, *SCALES) ** (size / (size - 2))
        take_out(fields, "alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "type", "factor")
        fields.table = {**fields.table, key: {**fields.table_of(key), "rope_type": "default", "rope_theta": theta}}
