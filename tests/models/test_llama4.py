"""Llama 4: what its files say, many chunks, and the part for text of models that see pictures, too."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Llama4Config, Llama4ForCausalLM, Llama4ForConditionalGeneration, Llama4TextConfig

from nanoengine import LLM, SamplingParams
from nanoengine.errors import UnsupportedModel
from nanoengine.models.architectures import read_model_config
from tests.models.families import SHAPES, engine, family_checkpoint
from tests.models.test_architectures import SIZES
from tests.support import TINY, forced_logits, reference_choices, reference_logits, reference_model, save_random

TOKENS = torch.randint(0, 250, (700,), generator=torch.Generator().manual_seed(0)).tolist()
TABLE = SIZES | {"architectures": ["Llama4ForCausalLM"], "num_hidden_layers": 8}
SCOUT_ROPE = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
SCOUT_ROPE |= {"original_max_position_embeddings": 64}


@pytest.mark.parametrize("size", [32, 100])
def test_prompts_of_many_chunks_are_those_of_transformers(tmp_path: Path, size: int) -> None:
    """Their steps end anywhere in a chunk, and a pool that holds a few chunks of a sequence holds all that is seen."""
    overrides = {"attention_chunk_size": size, "head_dim": 32, "rope_parameters": SCOUT_ROPE, "floor_scale": 150}
    folder = family_checkpoint(tmp_path, "Llama 4", max_position_embeddings=1024, **overrides)
    model = reference_model(folder)
    right = reference_logits(model, TOKENS)
    params = SamplingParams(temperature=0, max_tokens=2 * size, ignore_eos=True)
    with engine(folder, num_kv_blocks=300, max_num_batched_tokens=97) as llm:
        found = forced_logits(llm, TOKENS, num_prompt_tokens=650, chunk=97)
        torch.testing.assert_close(found, right, rtol=0, atol=1e-4)
        tokens = llm.generate([TOKENS[:600]], params, use_tqdm=False)[0].outputs[0].token_ids
        assert tokens == reference_choices(model, TOKENS[:600], tokens)


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
            texts.append(llm.generate([TOKENS], params, use_tqdm=False)[0].outputs[0].token_ids)
    assert "layers with chunks of 32" in caplog.text
    assert texts[0] == texts[1]


def test_the_part_for_text_of_a_model_that_sees_pictures(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    ours = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    text = SHAPES["Llama 4"][1] | {"pad_token_id": None} | {name: TINY[name] for name in ours}
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    vision |= {"image_size": 28, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
    config = Llama4Config(text_config=text, vision_config=vision)
    model = Llama4ForConditionalGeneration(config).eval()
    folder = save_random(model, tmp_path)
    right = reference_logits(Llama4ForConditionalGeneration.from_pretrained(folder).language_model, TOKENS[:75])
    with caplog.at_level(logging.WARNING, "nanoengine"), engine(folder) as llm:
        torch.testing.assert_close(forced_logits(llm, TOKENS[:75], 60, 40), right, rtol=0, atol=1e-4)
    assert "vision" in caplog.text
    assert "tensors (such as " in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_chunk_size": None},
        {"attention_chunk_size": 128, "no_rope_layer_interval": 3, "interleave_moe_layer_step": 2},
        {"no_rope_layers": [], "moe_layers": [1, 2], "attention_bias": True, "tie_word_embeddings": True},
        {"layer_types": ["full_attention", "chunked_attention"] * 4, "rms_norm_eps": 1e-6, "head_dim": 16},
        {"rope_scaling": SCOUT_ROPE, "rope_theta": 1e4, "use_qk_norm": False, "intermediate_size_mlp": 20},
        {"attn_temperature_tuning": False},
        {"floor_scale": 100, "attn_scale": 0.5},
    ],
    ids=str,
)
def test_what_a_file_says_and_leaves_out_means_what_it_means_to_transformers(changes: dict[str, Any]) -> None:
    table = TABLE | changes
    theirs = Llama4TextConfig(**{key: own for key, own in table.items() if key != "architectures"})
    ours = read_model_config(table)
    layers = [ours.layer(i) for i in range(8)]
    chunks = [theirs.attention_chunk_size if kind == "chunked_attention" else None for kind in theirs.layer_types]
    assert [layer.window for layer in layers] == chunks
    assert [layer.rope is not None for layer in layers] == [bool(one) for one in theirs.no_rope_layers]
    assert [i for i, layer in enumerate(layers) if layer.has_experts] == theirs.moe_layers
    assert {layer.rope.theta for layer in layers if layer.rope} == {theirs.rope_parameters["rope_theta"]}
    assert (ours.query_growth, ours.query_period) == (
        (theirs.attn_scale, theirs.floor_scale) if theirs.attn_temperature_tuning else (0.0, 1)
    )
    assert ours.qk_norm == ("plain" if theirs.use_qk_norm else None)
    assert (ours.rms_norm_eps, ours.head_dim) == (theirs.rms_norm_eps, theirs.head_dim)
    with torch.device("meta"):
        assert ours.num_parameters() == Llama4ForCausalLM(theirs).num_parameters()


def test_files_of_old_say_with_a_number_that_queries_grow() -> None:
    assert read_model_config(TABLE | {"attn_temperature_tuning": 4}) == read_model_config(TABLE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 2}, "num_experts_per_tok is 2: only 1"),
        ({"layer_types": ["sliding_attention"] * 8}, "layer_types is"),
        ({"layer_types": ["chunked_attention"] * 8, "attention_chunk_size": None}, "attention_chunk_size is None"),
        ({"attention_chunk_size": 0}, "attention_chunk_size is 0"),
        ({"moe_layers": ["1"]}, "moe_layers is"),
        ({"no_rope_layers": [1]}, "no_rope_layers is"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "use_qk_norm is True.* 1.138"),
        ({"floor_scale": 0}, "floor_scale is 0"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_model_config(TABLE | changes)


def test_a_draft_model_may_have_chunks(tmp_path: Path) -> None:
    """Its K/V lie in the blocks of layers that see everything."""
    folder = family_checkpoint(tmp_path, "Llama 4", head_dim=32)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    texts = []
    for speculation in (None, f"model:{folder}"):
        with LLM(str(folder), device="cpu", use_tqdm=False, num_kv_blocks=200, speculation=speculation) as llm:
            texts.append(llm.generate([TOKENS[:50]], params, use_tqdm=False)[0].outputs[0].token_ids)
    assert texts[0] == texts[1]
