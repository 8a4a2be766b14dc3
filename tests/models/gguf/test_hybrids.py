"""GGUF files of hybrids: the same numbers as their folders, quantized or not; what a file says of layers with states."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from nanoengine import SamplingParams
from nanoengine.errors import InvalidWeights, UnsupportedModel
from nanoengine.models.gguf.file import GGUFFile
from nanoengine.models.gguf.translate import hf_config
from tests.models.families import engine, family_checkpoint
from tests.models.gguf.written import F32, write_file, write_gguf
from tests.support import forced_logits, model_runner

TOKENS = torch.randint(0, 250, (75,), generator=torch.Generator().manual_seed(0)).tolist()
SIX_HEADS = {"linear_num_value_heads": 6}
WIDE = {"hidden_size": 64, "intermediate_size": 96}
WIDE_OF = {
    "LFM2": WIDE,
    "LFM2-MoE": WIDE | {"moe_intermediate_size": 32},
    "Qwen3.5": WIDE | SIX_HEADS,
    "Qwen3-Next": WIDE | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    "Granite 4": WIDE | {"shared_intermediate_size": 96},
    "Falcon H1": WIDE | {"tie_word_embeddings": False},
    "Nemotron-H": WIDE | {"use_bias": False},
}
"""Rows of whole blocks."""

SHAPES: dict[str, dict[str, Any]] = {
    "LFM2": {},
    "LFM2-MoE": {},
    "Qwen3.5": SIX_HEADS,
    "Qwen3.5, odd sizes": {},
    "Qwen3-Next": {},
    "Qwen3.5-MoE": SIX_HEADS,
    "Granite 4": {},
    "Granite 4, dense, rotated": {"mamba_proj_bias": False},
    "Falcon H1": {"tie_word_embeddings": False},
    "Falcon H1, without norms, untied": {},
    "Nemotron-H": {"use_bias": False},
    "Nemotron 3": {},
    "Nemotron 3, experts of latents": {"layers_block_type": ["mamba", "moe", "attention"]},
}
"""Shapes that llama.cpp computes, too: what is other than in tests/models/families.py."""


def what_comes(path: Path, **options: Any) -> tuple[torch.Tensor, list[int]]:
    """Logits at every position, and tokens."""
    with engine(path, **options) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        (output,) = llm.generate([TOKENS[:40]], greedy, use_tqdm=False)
        return forced_logits(llm, TOKENS, 60, 40), list(output.outputs[0].token_ids)


def numbers_of(file: Path, path: Path) -> Path:
    """A file of the numbers that the blocks of another stand for."""
    reader, opened = GGUFReader(file), GGUFFile.open(file)
    numbers = {own.name: dequantize(own.data, own.tensor_type) for own in reader.tensors}
    keys = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in opened.metadata.items()}
    return write_file(path, keys.pop("general.architecture"), keys, numbers, F32)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_file_computes_what_its_folder_does(shape: str, tmp_path: Path) -> None:
    folder = family_checkpoint(tmp_path / "folder", shape, **SHAPES[shape])
    file = write_gguf(folder, tmp_path / "model.gguf")
    (right, tokens), (found, same) = what_comes(folder), what_comes(file, tokenizer=str(folder))
    torch.testing.assert_close(found, right, rtol=0, atol=1e-4)
    assert same == tokens


@pytest.mark.parametrize("shape", WIDE_OF)
def test_blocks_stay_blocks_and_are_right(shape: str, tmp_path: Path) -> None:
    """Beside a file of the numbers that the blocks stand for: to the bit, if activations are not rounded."""
    folder = family_checkpoint(tmp_path / "folder", shape, **WIDE_OF[shape])
    file = write_gguf(folder, tmp_path / "blocks.gguf", GGMLQuantizationType.Q8_0)
    plain = numbers_of(file, tmp_path / "numbers.gguf")
    options = {"tokenizer": str(folder), "activation_dtype": "float32"}
    found, right = what_comes(file, **options), what_comes(plain, **options)
    assert torch.equal(found[0], right[0])
    assert found[1] == right[1]
    with engine(file, tokenizer=str(folder)) as llm:
        mixers = model_runner(llm).model.mixers.values()
        assert all("Q8_0" in part.weight.formats() for mixer in mixers for part in (mixer.in_proj, mixer.out_proj))


def test_the_first_files_of_qwen3_next(tmp_path: Path) -> None:
    """They have q, k, v and z in one tensor, and no list of layers."""
    folder = family_checkpoint(tmp_path / "folder", "Qwen3-Next")
    more = {"attention__recurrent_layers": None, "feed_forward_length": None}
    file = write_gguf(folder, tmp_path / "model.gguf", legacy=True, **more)
    assert "blk.0.ssm_in.weight" in GGUFFile.open(file).tensors
    (right, tokens), (found, same) = what_comes(folder), what_comes(file, tokenizer=str(folder))
    torch.testing.assert_close(found, right, rtol=0, atol=1e-4)
    assert same == tokens


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


def test_halves_are_computed_in_bfloat16(tmp_path: Path) -> None:
    """Kernels of layers with states know float32 and bfloat16."""
    folder = family_checkpoint(tmp_path / "folder", "LFM2")
    file = write_gguf(folder, tmp_path / "model.gguf", GGMLQuantizationType.F16)
    assert hf_config(GGUFFile.open(file))["dtype"] == "bfloat16"
