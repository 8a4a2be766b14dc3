"""ShortConv against transformers."""

from __future__ import annotations

import pytest
from transformers import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from nanoengine.models.layers.short_conv import ShortConv
from nanoengine.models.model_config import StateConfig

from .mixers import check_against, factory


@pytest.mark.parametrize(("taps", "bias"), [(3, False), (2, True)])
def test_it_is_that_of_transformers(taps: int, bias: bool) -> None:
    config = Lfm2Config(hidden_size=24, conv_L_cache=taps, conv_bias=bias, num_hidden_layers=1, layer_types=["conv"])
    facts = StateConfig(taps=taps, channels=24, conv_bias=bias, proj_bias=bias)
    check_against(ShortConv(0, 24, facts, factory()), Lfm2ShortConv(config, 0))
