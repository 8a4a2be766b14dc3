"""Every family against transformers: logits after every token, prefilled, chunked and decoded, and the tokens that follow.

What a config.json says is in tests/models/test_families.py.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nanoengine import LLM, SamplingParams
from nanoengine.errors import InvalidConfig
from nanoengine.models.architectures import ARCHITECTURES
from tests.models.families import SEEING, SHAPES, engine, family_checkpoint
from tests.models.quantization.packed_models import edit_weights
from tests.models.test_families import ALONE, SCOUT_ROPE
from tests.support import (
    TINY,
    forced_logits,
    model_runner,
    num_weights,
    num_weights_of_transformers,
    reference_choices,
    reference_logits,
    reference_model,
    save_random,
)

LONG_TEXT = torch.randint(0, 250, (700,), generator=torch.Generator().manual_seed(0)).tolist()
TOKENS = LONG_TEXT[:75]


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_at_every_position_are_those_of_transformers(tmp_path: Path, shape: str) -> None:
    folder = family_checkpoint(tmp_path, shape, seed=len(shape))
    model = reference_model(folder)
    right = reference_logits(model, TOKENS)
    assert right.std() > 0.15  # a model whose logits differ, so that 1e-4 means something
    max_len = SHAPES[shape][1].get("tests_max_len")
    with engine(folder, kernels="torch", max_model_len=max_len) as llm:
        found = [forced_logits(llm, TOKENS, num_prompt_tokens=60, chunk=17)]
    with engine(folder, max_model_len=max_len) as llm:
        count = num_weights(model_runner(llm).model)
        assert count == llm.built.models.num_parameters == num_weights_of_transformers(model)
        found += [forced_logits(llm, TOKENS, num_prompt_tokens=60, chunk=chunk) for chunk in (40, 7)]
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        for prompt in (TOKENS[:40], TOKENS[:57]):  # the second finds the first in the cache
            tokens = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
            assert tokens == reference_choices(model, prompt, tokens)
    for logits in found:
        torch.testing.assert_close(logits, right, rtol=0, atol=1e-4)


def test_every_architecture_is_tried() -> None:
    assert {f"{family}ForCausalLM" for family, _ in SHAPES.values()} == set(ALONE) <= set(ARCHITECTURES)


def test_prompts_of_many_chunks_are_those_of_transformers(tmp_path: Path) -> None:
    """Their steps end anywhere in a chunk, and a pool that holds a few chunks of a sequence holds all that is seen."""
    overrides = {"attention_chunk_size": 32, "head_dim": 32, "rope_parameters": SCOUT_ROPE, "floor_scale": 150}
    folder = family_checkpoint(tmp_path, "Llama 4", max_position_embeddings=1024, **overrides)
    model = reference_model(folder)
    right = reference_logits(model, LONG_TEXT)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    with engine(folder, num_kv_blocks=300, max_num_batched_tokens=97) as llm:
        found = forced_logits(llm, LONG_TEXT, num_prompt_tokens=650, chunk=97)
        torch.testing.assert_close(found, right, rtol=0, atol=1e-4)
        tokens = llm.generate([LONG_TEXT[:600]], params, use_tqdm=False)[0].outputs[0].token_ids
        assert tokens == reference_choices(model, LONG_TEXT[:600], tokens)


def test_chunks_that_are_over_give_their_blocks_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All five groups in full would need 5 x 56 blocks."""
    folder = family_checkpoint(tmp_path, "Llama 4", max_position_embeddings=1024, attention_chunk_size=32)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    texts = []
    for options in (
        {"num_kv_blocks": 5 * 56},
        {"num_kv_blocks": 90, "max_num_batched_tokens": 64, "max_model_len": 896},
    ):
        with caplog.at_level(logging.DEBUG, "nanoengine"), engine(folder, block_size=16, **options) as llm:
            texts.append(llm.generate([LONG_TEXT], params, use_tqdm=False)[0].outputs[0].token_ids)
    assert "layers with chunks of 32" in caplog.text
    assert texts[0] == texts[1]


def test_long_prompts_are_those_of_transformers(tmp_path: Path) -> None:
    """In chunks that nothing divides, to 4,096 tokens."""
    tokens = torch.randint(0, 250, (4096,), generator=torch.Generator().manual_seed(0)).tolist()
    for shape in ("LFM2", "Qwen3.5", "Granite 4", "Falcon H1", "Nemotron-H"):
        folder = family_checkpoint(tmp_path / shape, shape, max_position_embeddings=4200)
        right = reference_logits(reference_model(folder), tokens)[-64:]
        with engine(folder, num_kv_blocks=300, max_num_batched_tokens=4096) as llm:
            found = forced_logits(llm, tokens, 4090, 409)[-64:]
        torch.testing.assert_close(found, right, rtol=0, atol=1e-4)


# ---- other forms of checkpoints


def test_experts_in_one_tensor_are_those_one_by_one(tmp_path: Path) -> None:
    shape, texts = "Qwen3.5-MoE", []
    folder = family_checkpoint(tmp_path, shape)
    path = folder / "model.safetensors"
    for is_stacked in (False, True):
        if is_stacked:
            tensors = load_file(path)
            names = [name for name in tensors if ".experts." in name]
            count = 1 + max(int(name.split(".experts.")[1].split(".")[0]) for name in names)
            for prefix in {name.split(".experts.")[0] + ".experts" for name in names}:
                own = {
                    part: [tensors.pop(f"{prefix}.{i}.{part}.weight") for i in range(count)]
                    for part in ("gate_proj", "up_proj", "down_proj")
                }
                both = [torch.cat(pair) for pair in zip(own["gate_proj"], own["up_proj"], strict=True)]
                tensors |= {
                    f"{prefix}.gate_up_proj": torch.stack(both),
                    f"{prefix}.down_proj": torch.stack(own["down_proj"]),
                }
            save_file(tensors, path)
        with engine(folder) as llm:
            texts.append(forced_logits(llm, TOKENS, 60, 40))
    assert torch.equal(*texts)


@pytest.mark.parametrize("name", SEEING)
def test_the_part_for_text_of_transformers_models_that_see_pictures(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    shape, outer, own = SEEING[name]
    ours = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    text = {key: TINY[key] for key in (*ours, "num_hidden_layers")} | SHAPES[shape][1] | {"pad_token_id": None}
    text |= outer.get("text_config", {})
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "depth": 1, "num_attention_heads": 2, "num_heads": 2}
    vision |= {"intermediate_size": 64, "image_size": 28} | own
    made = getattr(transformers, f"{name.partition(',')[0]}ForConditionalGeneration")
    model = made(made.config_class(**outer | {"text_config": text, "vision_config": vision})).eval()
    folder = save_random(model, tmp_path)
    again = made.from_pretrained(folder)
    right = reference_logits(again.language_model if name == "Llama4" else again, LONG_TEXT[:75])
    edit_weights(
        folder, lambda tensors: tensors.update({"mtp.norm.weight": torch.ones(3)})
    )  # of a draft of later tokens
    with caplog.at_level(logging.WARNING, "nanoengine"), engine(folder) as llm:
        torch.testing.assert_close(forced_logits(llm, LONG_TEXT[:75], 60, 40), right, rtol=0, atol=1e-4)
    assert "vision" in caplog.text
    assert "tensors (such as " in caplog.text


# ---- draft models


def test_a_draft_model_with_states_is_refused(tmp_path: Path) -> None:
    folder = family_checkpoint(tmp_path, "LFM2")
    with pytest.raises(InvalidConfig, match="whose layers have states"):
        LLM(str(folder), device="cpu", use_tqdm=False, num_kv_blocks=50, speculation=f"model:{folder}")


def test_a_draft_model_may_have_chunks(tmp_path: Path) -> None:
    """Its K/V lie in the blocks of layers that see everything."""
    folder = family_checkpoint(tmp_path, "Llama 4", head_dim=32)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    texts = []
    for speculation in (None, f"model:{folder}"):
        with LLM(str(folder), device="cpu", use_tqdm=False, num_kv_blocks=200, speculation=speculation) as llm:
            texts.append(llm.generate([LONG_TEXT[:50]], params, use_tqdm=False)[0].outputs[0].token_ids)
    assert texts[0] == texts[1]
