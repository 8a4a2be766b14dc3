"""Every family against transformers: logits after every token, prefilled, chunked and decoded; and which files are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nanoengine import LLM, SamplingParams
from nanoengine.errors import UnsupportedModel
from nanoengine.models.architectures import ARCHITECTURES, read_model_config
from tests import support
from tests.models.configs import QWEN3_06B, without
from tests.models.families import SHAPES, family_checkpoint
from tests.support import (
    fill_kv_with_nan,
    forced_logits,
    model_runner,
    num_weights,
    reference_choices,
    reference_logits,
    reference_model,
)

TOKENS = torch.randint(0, 250, (75,), generator=torch.Generator().manual_seed(0)).tolist()


def engine(folder: Path, **options: Any) -> LLM:
    """An engine whose KV pool is full of NaN."""
    llm = LLM(str(folder), use_tqdm=False, **{"num_kv_blocks": 100, "device": "cpu", "dtype": "float32"} | options)
    fill_kv_with_nan(llm)
    return llm


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_at_every_position_are_those_of_transformers(tmp_path: Path, shape: str) -> None:
    folder = family_checkpoint(tmp_path, shape, seed=len(shape))
    model = reference_model(folder)
    right = reference_logits(model, TOKENS)
    assert right.std() > 0.15  # a model whose logits differ, so that 1e-4 means something
    max_len = SHAPES[shape][1].get("tests_max_len")
    for kernels, chunks in (("auto", (40, 7)), ("torch", (17,))):
        with engine(folder, kernels=kernels, max_model_len=max_len) as llm:
            for chunk in chunks:
                logits = forced_logits(llm, TOKENS, num_prompt_tokens=40, chunk=chunk)
                torch.testing.assert_close(logits, right, rtol=0, atol=1e-4)
            assert llm.model_config.num_parameters() == num_weights(model_runner(llm).model) == model.num_parameters()
            params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
            for prompt in (TOKENS[:40], TOKENS[:57]):  # the second finds the first in the cache
                tokens = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
                assert tokens == reference_choices(model, prompt, tokens)


def test_every_architecture_is_tried() -> None:
    tried = {f"{family}ForCausalLM" for family, _ in SHAPES.values()}
    assert tried == set(ARCHITECTURES)


# ---- what a config.json says


def test_qwen3_06b_in_the_schema_of_transformers_4() -> None:
    assert read_model_config(QWEN3_06B) == support.QWEN3_06B


def test_qwen3_06b_in_the_schema_of_transformers_5_is_the_same() -> None:
    config = without("rope_theta", "rope_scaling", "torch_dtype") | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
        "dtype": "bfloat16",
    }
    assert read_model_config(config) == read_model_config(QWEN3_06B)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("prefix", ["", "torch."])
def test_the_checkpoints_dtype_is_found_in_every_spelling(key: str, dtype: str, prefix: str) -> None:
    assert read_model_config(without("torch_dtype") | {key: prefix + dtype}).dtype == dtype


def test_without_a_dtype_it_is_float32() -> None:
    assert read_model_config(without("torch_dtype")).dtype == "float32"


def test_other_dtypes_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="float8_e4m3fn"):
        read_model_config(QWEN3_06B | {"torch_dtype": "float8_e4m3fn"})


@pytest.mark.parametrize(
    "architectures",
    [
        ["GPT2LMHeadModel"],
        ["Gemma3ForCausalLM", 7],
        [],
        None,
        "Qwen3Model",
        "Qwen3ForCausalLM",
        {"Qwen3ForCausalLM": 1},
        [["Qwen3ForCausalLM"]],
        7,
        True,
    ],
    ids=str,
)
def test_other_architectures_are_refused_with_the_supported_ones(architectures: object) -> None:
    with pytest.raises(UnsupportedModel, match="supported are GraniteForCausalLM, Llama"):
        read_model_config(QWEN3_06B | {"architectures": architectures})


def test_a_config_without_architectures_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="architectures"):
        read_model_config({})
