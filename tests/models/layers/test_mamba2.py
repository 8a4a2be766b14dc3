"""Mamba2 against transformers."""

from __future__ import annotations

import pytest
from transformers import GraniteMoeHybridConfig
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer

from nanoengine.models.layers.mamba2 import Mamba2
from nanoengine.models.model_config import StateConfig
from tests.support import norm_by_groups

from .mixers import check_against, factory


@pytest.mark.parametrize(("groups", "bias"), [(1, False), (2, True)])
def test_it_is_that_of_transformers(groups: int, bias: bool) -> None:
    sizes = {"mamba_n_heads": 4, "mamba_d_head": 12, "mamba_d_state": 8, "mamba_n_groups": groups, "hidden_size": 24}
    config = GraniteMoeHybridConfig(
        **sizes, mamba_proj_bias=bias, mamba_conv_bias=bias, num_hidden_layers=1, layer_types=["linear_attention"]
    )
    facts = StateConfig(
        taps=4,
        channels=48 + 16 * groups,
        num_heads=4,
        num_groups=groups,
        depth=8,
        width=12,
        conv_bias=bias,
        proj_bias=bias,
    )
    theirs = GraniteMoeHybridMambaLayer(config, 0)
    norm_by_groups(theirs, groups)
    check_against(Mamba2(0, 24, facts, factory(), config.rms_norm_eps), theirs)
