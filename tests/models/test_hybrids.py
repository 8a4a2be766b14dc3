"""Families of layers with states: what their files say, and the part for text of models that see pictures, too."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nanoengine import LLM
from nanoengine.errors import InvalidConfig, UnsupportedModel
from nanoengine.models.architectures import read_model_config
from tests.models.families import engine, family_checkpoint
from tests.models.test_architectures import SIZES
from tests.support import forced_logits, reference_logits, reference_model

TOKENS = torch.randint(0, 250, (75,), generator=torch.Generator().manual_seed(0)).tolist()
LFM2 = SIZES | {"architectures": ["Lfm2ForCausalLM"], "layer_types": ["conv", "full_attention"] * 2}
QWEN = SIZES | {"architectures": ["Qwen3_5ForCausalLM"]}
NEXT = SIZES | {"architectures": ["Qwen3NextForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2}
NEXT |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
GRANITE = SIZES | {"architectures": ["GraniteMoeHybridForCausalLM"], "layer_types": ["mamba", "attention"] * 2}
GRANITE |= {"mamba_n_heads": 4}


def seeing(folder: Path, shape: str, *, prefix: str) -> Path:
    """A checkpoint of the shape as those of models that see pictures are stored, with tensors that no text needs."""
    family_checkpoint(folder, shape)
    path = folder / "model.safetensors"
    tensors = {
        prefix + name.removeprefix("model.") if name.startswith("model.") else name: own
        for name, own in load_file(path).items()
    }
    extra = {"model.visual.patch_embed.weight": torch.ones(3), "mtp.layers.0.input_layernorm.weight": torch.ones(3)}
    save_file({name: own.contiguous() for name, own in (tensors | extra).items()}, path)
    table = json.loads((folder / "config.json").read_text())
    architecture = table.pop("architectures")[0].replace("ForCausalLM", "ForConditionalGeneration")
    outer = {"architectures": [architecture], "text_config": table, "vision_config": {"depth": 2}, "image_token_id": 7}
    outer |= {"tie_word_embeddings": table["tie_word_embeddings"], "model_type": "qwen3_5"}
    (folder / "config.json").write_text(json.dumps(outer))
    return folder


@pytest.mark.parametrize("shape", ["Qwen3.5", "Qwen3.5-MoE"])
def test_the_part_for_text_of_a_model_that_sees_pictures(
    tmp_path: Path, shape: str, caplog: pytest.LogCaptureFixture
) -> None:
    right = reference_logits(reference_model(family_checkpoint(tmp_path / "text", shape)), TOKENS)
    with (
        caplog.at_level(logging.WARNING, "nanoengine"),
        engine(seeing(tmp_path / "seeing", shape, prefix="model.language_model.")) as llm,
    ):
        torch.testing.assert_close(forced_logits(llm, TOKENS, 60, 40), right, rtol=0, atol=1e-4)
    assert "2 tensors" in caplog.text
    assert "vision" in caplog.text


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


@pytest.mark.parametrize(
    ("table", "changes", "message"),
    [
        (LFM2, {"layer_types": ["conv"] * 4}, "layer_types is.*layers with attention"),
        (LFM2, {"layer_types": ["full_attention"] * 4}, "others with states"),
        (LFM2, {"layer_types": None}, "layer_types is missing"),
        (LFM2, {"layer_types": None, "full_attn_idxs": ["1"]}, "full_attn_idxs is"),
        (LFM2, {"conv_L_cache": 9}, "conv_L_cache is 9.*at most 8"),
        (LFM2, {"block_use_swiglu": False}, "block_use_swiglu is False"),
        (
            QWEN,
            {"linear_num_value_heads": 24, "linear_num_key_heads": 16},
            "linear_num_value_heads is 24.*multiple of 16",
        ),
        (QWEN, {"linear_key_head_dim": 512}, "linear_key_head_dim is 512.*at most 256"),
        (QWEN, {"attn_output_gate": False}, "attn_output_gate is False"),
        (QWEN, {"layer_types": ["sliding_attention"] * 4}, "layer_types is"),
        (NEXT, {"mlp_only_layers": ["1"]}, "mlp_only_layers is"),
        (GRANITE, {"time_step_limit": [0.0, 1.0]}, "time_step_limit is"),
        (GRANITE, {"mamba_d_head": 10}, "mamba_n_heads is 4.*must make 64"),
        (GRANITE, {"position_embedding_type": "learned"}, "position_embedding_type is 'learned'"),
        (GRANITE, {"mamba_n_groups": 3}, "mamba_n_heads is 4.*multiple of 3"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(table: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    read_model_config(table)
    with pytest.raises(UnsupportedModel, match=message):
        read_model_config(table | changes)


@pytest.mark.parametrize("table", [LFM2, QWEN, NEXT, GRANITE], ids=lambda table: table["architectures"][0])
def test_what_a_file_leaves_out_means_what_it_means_to_transformers(table: dict[str, Any]) -> None:
    (architecture,) = table["architectures"]
    theirs = getattr(transformers, architecture).config_class(
        **{k: v for k, v in table.items() if k != "architectures"}
    )
    ours = read_model_config(table)
    kinds = {"full_attention": None, "attention": None}
    assert [ours.layer(i).mixer is None for i in range(4)] == [kind in kinds for kind in theirs.layer_types]
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rms_norm_eps == getattr(theirs, "norm_eps", None) or theirs.rms_norm_eps
    model = getattr(transformers, architecture)
    with torch.device("meta"):
        assert ours.num_parameters() == model(theirs).num_parameters()


def test_a_draft_model_with_states_is_refused(tmp_path: Path) -> None:
    folder = family_checkpoint(tmp_path, "LFM2")
    with pytest.raises(InvalidConfig, match="whose layers have states"):
        LLM(str(folder), device="cpu", use_tqdm=False, num_kv_blocks=50, speculation=f"model:{folder}")


def test_long_prompts_are_those_of_transformers(tmp_path: Path) -> None:
    """In chunks that nothing divides, to 4,096 tokens."""
    tokens = torch.randint(0, 250, (4096,), generator=torch.Generator().manual_seed(0)).tolist()
    for shape in ("LFM2", "Qwen3.5", "Granite 4"):
        folder = family_checkpoint(tmp_path / shape, shape, max_position_embeddings=4200)
        right = reference_logits(reference_model(folder), tokens)[-64:]
        with engine(folder, num_kv_blocks=300, max_num_batched_tokens=4096) as llm:
            found = forced_logits(llm, tokens, 4090, 409)[-64:]
        torch.testing.assert_close(found, right, rtol=0, atol=1e-4)
