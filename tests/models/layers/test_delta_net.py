"""DeltaNet against transformers, as both families store it."""

from __future__ import annotations

import pytest
from transformers import Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from nanoengine.models.layers.delta_net import DeltaNet
from nanoengine.models.model_config import StateConfig

from .mixers import check_against, factory

SIZES = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 10}
SIZES |= {"hidden_size": 24, "num_hidden_layers": 1, "linear_conv_kernel_dim": 4}


@pytest.mark.parametrize("is_packed", [False, True])
def test_it_is_that_of_transformers(is_packed: bool) -> None:
    packed = ("qkvz", "ba") if is_packed else ()
    facts = StateConfig(taps=4, channels=92, num_heads=6, num_groups=2, depth=8, width=10, packed=packed)
    kind, module = (Qwen3NextConfig, Qwen3NextGatedDeltaNet) if is_packed else (Qwen3_5TextConfig, Qwen3_5GatedDeltaNet)
    config = kind(**SIZES, layer_types=["linear_attention"])
    check_against(DeltaNet(0, 24, facts, factory(), config.rms_norm_eps), module(config, 0))
