"""Every family against transformers: logits after every token, prefilled, chunked and decoded; and which files are refused."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nanoengine import SamplingParams
from nanoengine.errors import UnsupportedModel
from nanoengine.models.architectures import ARCHITECTURES, LENGTHS, read_model_config
from nanoengine.models.families import granite_hybrid, lfm2, llama4, qwen3_next
from tests import support
from tests.models.configs import QWEN3_06B, VERSION_5
from tests.models.families import SHAPES, engine, family_checkpoint
from tests.support import forced_logits, model_runner, num_weights, reference_choices, reference_logits, reference_model

TOKENS = torch.randint(0, 250, (75,), generator=torch.Generator().manual_seed(0)).tolist()


SEEING = {name for name in ARCHITECTURES if name.endswith("ForConditionalGeneration")}
"""They see pictures, too: tests/models/test_hybrids.py."""


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
                logits = forced_logits(llm, TOKENS, num_prompt_tokens=60, chunk=chunk)
                torch.testing.assert_close(logits, right, rtol=0, atol=1e-4)
            assert num_weights(model_runner(llm).model) == model.num_parameters()
            assert llm.built.models.model_config.num_parameters() == model.num_parameters()
            params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
            for prompt in (TOKENS[:40], TOKENS[:57]):  # the second finds the first in the cache
                tokens = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
                assert tokens == reference_choices(model, prompt, tokens)


def test_every_architecture_is_tried() -> None:
    tried = {f"{family}ForCausalLM" for family, _ in SHAPES.values()}
    assert tried == {name for name in ARCHITECTURES if name not in SEEING}


# ---- what a config.json says

HYBRIDS = (lfm2, qwen3_next, granite_hybrid, llama4)  # tests/models/test_hybrids.py, test_llama4.py
SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 8192}
SIZES_OF = {
    "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "GptOssForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3MoeForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
LAYERS = {"full": ["full_attention"] * 4, "both": ["full_attention", "sliding_attention"] * 2}
CHANGES: list[dict[str, Any]] = [
    *({}, {"sliding_window": 8}, {"sliding_window": None}),
    *({"use_sliding_window": True} | own for own in ({}, {"sliding_window": 8})),
    *({"use_sliding_window": True, "max_window_layers": count} for count in (2, 4)),
    *({"sliding_window": 8, "layer_types": kinds} for kinds in LAYERS.values()),
    *({"sliding_window": 8, "use_sliding_window": True, "layer_types": kinds} for kinds in LAYERS.values()),
]


WINDOW_IN_ALL_LAYERS = ("mistral", "mixtral", "phi3", "qwen3_moe")
WINDOW_BY_TYPE = ("qwen2", "qwen3", "smollm3", "olmo3", "gemma2", "gemma3_text", "gpt_oss")


def windows_of_transformers(config: Any) -> list[int | None]:
    """What each layer sees, as the models of transformers look it up."""
    types = ["full_attention"] * config.num_hidden_layers
    if config.model_type in WINDOW_IN_ALL_LAYERS:
        types = ["sliding_attention"] * config.num_hidden_layers
    elif config.model_type in WINDOW_BY_TYPE:
        types = config.layer_types
    return [config.sliding_window if kind == "sliding_attention" else None for kind in types]


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if ARCHITECTURES[name] not in HYBRIDS])
def test_what_a_file_says_and_leaves_out_means_what_it_means_to_transformers(architecture: str) -> None:
    for changes in CHANGES:
        check_meaning(architecture, changes)


def check_meaning(architecture: str, changes: dict[str, Any]) -> None:
    table = SIZES | SIZES_OF.get(architecture, {}) | changes
    theirs = getattr(transformers, architecture).config_class(**table)
    stated = table | {"architectures": [architecture]}
    if "use_sliding_window" in changes and not architecture.startswith(("Qwen", "SmolLM3")):
        with pytest.raises(UnsupportedModel, match="'use_sliding_window' is True"):
            read_model_config(stated)
        return
    ours = read_model_config(stated)
    assert [ours.layer(i).window for i in range(ours.num_layers)] == windows_of_transformers(theirs)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or SIZES["hidden_size"] // SIZES["num_attention_heads"])
    ropes = theirs.rope_parameters
    thetas = {layer.rope.theta for layer in ours.layers if layer.rope is not None}
    assert thetas == {
        rope["rope_theta"] for rope in ([ropes] if "rope_theta" in ropes else map(ropes.get, theirs.layer_types))
    }
    rotates = [ours.layer(i).rope is not None for i in range(ours.num_layers)]
    assert rotates == getattr(theirs, "no_rope_layers", [True] * ours.num_layers)
    if ours.experts is not None:
        assert ours.experts.normalize == getattr(theirs, "norm_topk_prob", True)


def test_gemma3_in_the_schema_of_transformers_4_scales_what_all_is_seen_of() -> None:
    stated = {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    stated |= {"sliding_window_pattern": 2, "cache_implementation": "hybrid"}
    theirs = transformers.Gemma3TextConfig(**SIZES, **stated)
    ours = read_model_config(SIZES | stated | {"architectures": ["Gemma3ForCausalLM"]})
    for layer, kind in enumerate(theirs.layer_types):
        rope, right = ours.layer(layer).rope, {"factor": 1.0} | theirs.rope_parameters[kind]
        assert rope is not None
        assert [rope.theta, rope.kind, rope.factor] == [right[key] for key in ("rope_theta", "rope_type", "factor")]


def test_what_phi3_was_trained_on_stands_beside_its_rotation() -> None:
    factors = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    key = "original_max_position_embeddings"
    for stated, inner in product(({}, {key: 2048}), ({}, {key: 64})):
        table = SIZES | stated | {"rope_scaling": factors | inner}
        theirs = transformers.Phi3Config(**table).rope_parameters[key]
        rope = read_model_config(table | {"architectures": ["Phi3ForCausalLM"]}).layers[0].rope
        assert rope is not None
        assert rope.trained_positions == theirs


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
        ("Olmo3ForCausalLM", {"rope_theta": 1e4}, "rope_theta is 10000.0"),
        ("Olmo3ForCausalLM", {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters is"),
        ("LlamaForCausalLM", {"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'.*true or false"),
        ("LlamaForCausalLM", {"output_multiplier_scale": 0.3}, "output_multiplier_scale"),
        ("LlamaForCausalLM", {"layer_types": ["linear_attention"] * 4}, "layer_types is"),
        ("LlamaForCausalLM", {"head_dim": 2**20}, "head_dim is 1048576.*at most"),
        ("MixtralForCausalLM", {"num_local_experts": 2**20}, "1048576 experts.*at most 65536"),
        ("MixtralForCausalLM", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5.*at most 4"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": ["1"]}, "mlp_only_layers is"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("Gemma3ForCausalLM", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu': only 'gelu_pytorch_tanh'"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping' is 50.0"),
        ("Gemma3ForCausalLM", {"rope_local_base_freq": 1e308}, "rope_local_base_freq is 1e.308"),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ("GptOssForCausalLM", {"swiglu_limit": 6.0}, "swiglu_limit is 6.0: only 7.0"),
        (
            "GptOssForCausalLM",
            {"quantization_config": {"quant_method": "awq", "bits": 4}},
            "MXFP4 is read of gpt-oss alone",
        ),
        ("LlamaForCausalLM", {"quantization_config": {"quant_method": "mxfp4"}}, "MXFP4 is read of gpt-oss alone"),
        ("LlamaForCausalLM", {"rope_theta": 1e308}, "rope_theta is 1e.308.*from 1.001 to"),
        ("LlamaForCausalLM", {"rope_theta": 1}, "rope_theta is 1 .*from 1.001 to"),
        ("Qwen2ForCausalLM", {"is_causal": False}, "is_causal is False"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 1e308}, "partial_rotary_factor is 1e.308"),
        ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "dynamic", "factor": 0.5}}, "factor is 0.5.*from 1 to"),
        ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": 1e308}}, "beta_fast"),
    ],
    ids=str,
)
def test_what_would_be_computed_otherwise_or_not_at_all_is_refused_by_name(
    architecture: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_model_config(SIZES | SIZES_OF.get(architecture, {}) | changes | {"architectures": [architecture]})


def test_qwen3_06b_in_the_schemas_of_transformers_4_and_5() -> None:
    assert read_model_config(QWEN3_06B) == read_model_config(VERSION_5) == support.QWEN3_06B


def test_a_model_without_a_head_is_of_its_family() -> None:
    said = [read_model_config(QWEN3_06B | {"architectures": [name]}) for name in ("Qwen3Model", "Qwen3ForCausalLM")]
    assert said[0] == said[1]


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_a_family_is_known_by_what_either_field_calls_it(name: str) -> None:
    """As the first files of LLaMA were spelled; and by the model_type of transformers alone."""
    for stated in ([name.upper().replace("CAUSALLM", "CausalLM")], [name.replace("Llama", "LLaMA")], None):
        kinds = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        kind = min((kind for kind, own in kinds.items() if own == name), key=len, default=None)
        if stated is None and kind in (None, "llama4"):  # of a model that sees pictures, too
            continue
        with pytest.raises(UnsupportedModel) as caught:
            read_model_config({"architectures": stated, "model_type": kind})
        assert "architectures" not in str(caught.value), "the family has read it, and misses its fields"


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_have_many_names_and_the_smallest_counts(name: str) -> None:
    alone = {key: value for key, value in QWEN3_06B.items() if key != "max_position_embeddings"}
    assert read_model_config(alone | {name: 2048}).max_position_embeddings == 2048
    assert read_model_config(QWEN3_06B | {name: 2048}).max_position_embeddings == 2048
    assert read_model_config(QWEN3_06B | {name: 1 << 20}).max_position_embeddings == 40960
    assert read_model_config(QWEN3_06B | {name: None}).max_position_embeddings == 40960
    for wrong in (0, "long", 10**30):
        with pytest.raises(UnsupportedModel, match=f"^{name} is "):
            read_model_config(QWEN3_06B | {name: wrong})
    with pytest.raises(UnsupportedModel, match="max_position_embeddings is None"):
        read_model_config(alone)


@pytest.mark.parametrize(
    ("stated", "why"),
    [
        (["MambaForCausalLM"], "none of them is supported"),
        (["LlamaBidirectionalModel"], "none of them is supported"),
        ("LlamaForCausalLM", "it must be a list"),
        (None, "must be a list"),
    ],
)
def test_an_architecture_that_is_none_is_told_why(stated: object, why: str) -> None:
    with pytest.raises(UnsupportedModel, match=why):
        read_model_config({"architectures": stated})
