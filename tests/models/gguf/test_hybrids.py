"""GGUF files of hybrids: what a file says of layers with states."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoengine.errors import InvalidWeights, UnsupportedModel
from tests.models.families import engine, family_checkpoint
from tests.models.gguf.test_files import what_comes
from tests.models.gguf.written import write_gguf


def test_layers_that_guess_ahead_are_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = family_checkpoint(tmp_path / "folder", "Qwen3.5")
    extra = {"blk.4.nextn.eh_proj.weight": torch.ones(48, 96), "blk.4.attn_q.weight": torch.ones(256, 48)}
    recurrent = [True, True, True, False, False]
    more: dict[str, Any] = {"block_count": 5, "nextn_predict_layers": 1, "attention__recurrent_layers": recurrent}
    file = write_gguf(folder, tmp_path / "model.gguf", more_tensors=extra, **more)
    with caplog.at_level(logging.WARNING, "nanoengine"):
        found, _ = what_comes(file, tokenizer=str(folder))
    torch.testing.assert_close(found, what_comes(folder)[0], rtol=0, atol=1e-4)
    assert "2 tensors (such as blk.4.nextn.eh_proj.weight) of vision and of multi-token prediction" in caplog.text


@pytest.mark.parametrize(
    ("shape", "keys", "message"),
    [
        ("LFM2", {"attention__head_count_kv": [0, 2]}, r"head_count_kv .*a count of each of 4 layers"),
        ("LFM2", {"attention__head_count_kv": [0, 2, 1, 0]}, r"head_count_kv .*equal in all layers"),
        ("LFM2", {"attention__head_count_kv": [0, 0, 0, 0]}, r"num_key_value_heads is 0"),
        ("LFM2", {"shortconv__l_cache": None}, r"no lfm2\.shortconv\.l_cache"),
        ("Qwen3.5", {"ssm__inner_size": 63}, r"ssm\.inner_size 63; supported is a multiple of 4"),
        ("Qwen3.5", {"ssm__time_step_rank": 0}, r"ssm\.inner_size 64; supported is a multiple of 0"),
        ("Qwen3.5", {"ssm__state_size": None}, r"no qwen35\.ssm\.state_size"),
        ("Qwen3.5", {"attention__recurrent_layers": [True]}, r"recurrent_layers .*each of 4 layers"),
        ("Qwen3.5", {"nextn_predict_layers": 4}, r"num_hidden_layers is 0"),
        ("Falcon H1", {"ssm__inner_size": None}, r"no falcon-h1\.ssm\.inner_size"),
        ("Nemotron-H", {"feed_forward_length": [0] * 4}, r"feed_forward_length .*a count of each of 5 layers"),
        ("Granite 4", {"ssm__inner_size": 100}, r"ssm\.inner_size 100; supported is a multiple of 48"),
        ("Granite 4", {"rope__scaling__finetuned": 1}, r"finetuned 1; supported is true or false"),
        ("LFM2-MoE", {"expert_gating_func": 1}, r"expert_gating_func 1; supported is 2"),
        ("Granite 4", {"ssm__dt_b_c_rms": True}, r"ssm\.dt_b_c_rms True, which is not supported"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    shape: str, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = family_checkpoint(tmp_path / "folder", shape)
    file = write_gguf(folder, tmp_path / "model.gguf", **keys)
    with pytest.raises(UnsupportedModel, match=message):
        engine(file, tokenizer=str(folder))


def test_a_tensor_that_no_layer_has_is_unexpected(tmp_path: Path) -> None:
    folder = family_checkpoint(tmp_path / "folder", "LFM2")
    file = write_gguf(folder, tmp_path / "model.gguf", more_tensors={"blk.0.shortconv.conv.bias": torch.ones(48)})
    with pytest.raises(InvalidWeights, match=r"unexpected \(1\): model\.layers\.0\.conv\.conv\.bias"):
        engine(file, tokenizer=str(folder))
