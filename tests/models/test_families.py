"""What a config.json says of a model, in every family: it means what it means to transformers, or is refused by name."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import transformers

from nanoengine.errors import UnsupportedModel
from nanoengine.models.architectures import ARCHITECTURES, LENGTHS, read_model_config
from nanoengine.models.loader import num_parameters
from tests import support
from tests.models.configs import QWEN3_06B, SIZES, SIZES_OF, VERSION_5, without
from tests.models.families import HYBRIDS

LAYERS = {"full": ["full_attention"] * 4, "both": ["full_attention", "sliding_attention"] * 2}
WINDOWS: list[dict[str, Any]] = [
    *({"sliding_window": 8}, {"sliding_window": None}),
    *({"use_sliding_window": True} | own for own in ({}, {"sliding_window": 8})),
    *({"use_sliding_window": True, "max_window_layers": count} for count in (2, 4)),
    *({"sliding_window": 8, "layer_types": kinds} for kinds in LAYERS.values()),
    *({"sliding_window": 8, "use_sliding_window": True, "layer_types": kinds} for kinds in LAYERS.values()),
]
SCOUT_ROPE = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
SCOUT_ROPE |= {"original_max_position_embeddings": 64}
CHUNKS: list[dict[str, Any]] = [
    {"attention_chunk_size": None},
    {"attention_chunk_size": 128, "no_rope_layer_interval": 3, "interleave_moe_layer_step": 2},
    {"no_rope_layers": [], "moe_layers": [1, 2], "attention_bias": True, "tie_word_embeddings": True},
    {"layer_types": ["full_attention", "chunked_attention"] * 4, "rms_norm_eps": 1e-6, "head_dim": 16},
    {"rope_scaling": SCOUT_ROPE, "rope_theta": 1e4, "use_qk_norm": False, "intermediate_size_mlp": 20},
    {"attn_temperature_tuning": False},
    {"floor_scale": 100, "attn_scale": 0.5},
]
ALONE = [name for name in ARCHITECTURES if name.endswith("ForCausalLM")]
"""Those with ForConditionalGeneration see pictures, too: tests/models/test_architectures.py runs their part for text."""

WINDOW_IN_ALL_LAYERS = ("mistral", "mixtral", "phi3", "qwen3_moe", "ministral3")
WINDOW_BY_TYPE = (
    *("dots1", "qwen2", "qwen2_moe", "qwen2_5_vl_text", "qwen3", "smollm3"),
    *("olmo3", "gemma2", "gemma3_text", "gemma4_text", "gemma4_unified_text", "gpt_oss", "exaone4"),
)


def table_of(family: str) -> dict[str, Any]:
    return SIZES | SIZES_OF.get(family, {}) | {"architectures": [f"{family}ForCausalLM"]}


def changes_of(family: str) -> list[dict[str, Any]]:
    if family.startswith("Gemma4"):  # whose last layer sees all, and whose others have a window
        kept = [own for own in WINDOWS if own.get("sliding_window", 8) is not None]
        return [own for own in kept if own.get("layer_types") != LAYERS["both"]]
    if family == "Exaone4":  # in transformers there must be layers that rotate
        return [
            change
            for change in WINDOWS
            if "use_sliding_window" in change or change.get("layer_types") == LAYERS["both"]
        ]
    return CHUNKS if family == "Llama4" else [] if family in HYBRIDS else WINDOWS


def windows_of_transformers(config: Any) -> list[int | None]:
    """What each layer sees, as the models of transformers look it up."""
    if config.model_type == "llama4_text":
        return [config.attention_chunk_size if kind == "chunked_attention" else None for kind in config.layer_types]
    types = ["full_attention"] * config.num_hidden_layers
    if config.model_type in WINDOW_IN_ALL_LAYERS:
        types = ["sliding_attention"] * config.num_hidden_layers
    elif config.model_type in WINDOW_BY_TYPE:
        types = config.layer_types
    window = config.sliding_window or None if "sliding_attention" in types else None
    return [window if kind == "sliding_attention" else None for kind in types]


@pytest.mark.parametrize("architecture", ALONE)
def test_what_a_file_says_and_leaves_out_means_what_it_means_to_transformers(architecture: str) -> None:
    family = architecture.removesuffix("ForCausalLM")
    model = getattr(transformers, architecture)
    for changes in ({}, *changes_of(family)):
        stated = table_of(family) | changes
        if "use_sliding_window" in changes and not family.startswith(("Qwen", "SmolLM3")):
            with pytest.raises(UnsupportedModel, match="'use_sliding_window' is True"):
                read_model_config(stated)
            continue
        theirs = model.config_class(**without("architectures", of=stated), pad_token_id=None)
        ours = read_model_config(stated)
        compare(ours, theirs)
        if changes in ({}, *CHUNKS):
            with torch.device("meta"):
                assert num_parameters(ours) == support.num_weights_of_transformers(model(theirs))


def compare(ours: Any, theirs: Any) -> None:
    sizes = (ours.vocab_size, ours.hidden_size, ours.num_layers, ours.num_heads)
    assert sizes == (theirs.vocab_size, theirs.hidden_size, theirs.num_hidden_layers, theirs.num_attention_heads)
    if not ours.has_v_norm:  # Gemma 4's sizes differ by layer
        assert ours.num_kv_heads == theirs.num_key_value_heads
    if ours.experts is None and ours.states is None:
        assert ours.intermediate_size == theirs.intermediate_size
    layers = [ours.layer(i) for i in range(ours.num_layers)]
    assert [layer.window for layer in layers] == windows_of_transformers(theirs)
    names = ("norm_eps", "layer_norm_epsilon", "rms_norm_eps")
    assert ours.rms_norm_eps == next(eps for name in names if (eps := getattr(theirs, name, None)) is not None)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    first = theirs.per_layer_config[0] if ours.has_v_norm else theirs
    size = getattr(first, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert (layers[0].head_dim or ours.head_dim) == size
    if ours.states is not None:
        attends = [kind in ("full_attention", "attention", "hybrid") for kind in theirs.layer_types]
        assert [layer.attends for layer in layers] == attends
        return
    ropes = theirs.rope_parameters
    thetas = [ropes] if "rope_theta" in ropes else [ropes[kind] for kind in theirs.layer_types]
    assert {layer.rope.theta for layer in layers if layer.rope} == {rope["rope_theta"] for rope in thetas}
    rotates = getattr(theirs, "no_rope_layers", [True] * ours.num_layers)
    if theirs.model_type == "exaone4":
        rotates = [kind == "sliding_attention" for kind in theirs.layer_types]
    assert [layer.rope is not None for layer in layers] == list(map(bool, rotates))
    if theirs.model_type == "llama4_text":
        assert [i for i, layer in enumerate(layers) if layer.has_experts] == theirs.moe_layers
        growth = (theirs.attn_scale, theirs.floor_scale) if theirs.attn_temperature_tuning else (0.0, 1)
        assert (ours.query_growth, ours.query_period) == growth
        assert ours.qk_norm == ("plain" if theirs.use_qk_norm else None)
    elif ours.experts is not None:
        assert ours.experts.normalize == getattr(theirs, "norm_topk_prob", True)


def test_files_of_old_say_with_a_number_that_queries_grow() -> None:
    table = table_of("Llama4")
    assert read_model_config(table | {"attn_temperature_tuning": 4}) == read_model_config(table)


def test_gemma3_in_the_schema_of_transformers_4_scales_what_all_is_seen_of() -> None:
    stated = {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    stated |= {"sliding_window_pattern": 2, "cache_implementation": "hybrid"}
    theirs = transformers.Gemma3TextConfig(**SIZES, **stated)
    ours = read_model_config(table_of("Gemma3") | stated)
    for layer, kind in enumerate(theirs.layer_types):
        rope, right = ours.layer(layer).rope, {"factor": 1.0} | theirs.rope_parameters[kind]
        assert rope is not None
        assert [rope.theta, rope.kind, rope.factor] == [right[key] for key in ("rope_theta", "rope_type", "factor")]


def test_what_phi3_was_trained_on_stands_beside_its_rotation() -> None:
    factors = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    key = "original_max_position_embeddings"
    for stated, inner in product(({}, {key: 2048}), ({}, {key: 64})):
        changes = stated | {"rope_scaling": factors | inner}
        rope = read_model_config(table_of("Phi3") | changes).layers[0].rope
        assert rope is not None
        assert rope.trained_positions == transformers.Phi3Config(**SIZES | changes).rope_parameters[key]


YARN, CHUNKED = {"type": "yarn", "factor": 4.0}, ["chunked_attention"] * 8
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("Phi3", {"rope_scaling": YARN}, "rope_type is 'yarn'"),
    ("Phi3", {"partial_rotary_factor": 1e308}, "partial_rotary_factor is 1e.308"),
    ("Olmo3", {"rope_theta": 1e4}, "rope_theta is 10000.0"),
    ("Olmo3", {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters is"),
    ("Llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'.*true or false"),
    ("Llama", {"layer_types": ["linear_attention"] * 4}, "layer_types is"),
    ("Llama", {"head_dim": 2**20}, "head_dim is 1048576.*at most"),
    ("Llama", {"rope_theta": 1e308}, "rope_theta is 1e.308.*from 1.001 to"),
    ("Llama", {"rope_theta": 1}, "rope_theta is 1 .*from 1.001 to"),
    ("Llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 0.5}}, "factor is 0.5.*from 1 to"),
    ("Llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": 1e308}}, "beta_fast"),
    ("Llama", {"quantization_config": {"quant_method": "mxfp4"}}, "MXFP4 is read of gpt-oss alone"),
    ("Mixtral", {"num_local_experts": 2**20}, "1048576 experts.*at most 65536"),
    ("Mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5.*at most 4"),
    ("Qwen2", {"is_causal": False}, "is_causal is False"),
    ("Qwen3Moe", {"mlp_only_layers": ["1"]}, "mlp_only_layers is"),
    ("Gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    ("Gemma3", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu': only 'gelu_pytorch_tanh'"),
    ("Gemma3", {"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping' is 50.0"),
    ("Gemma3", {"rope_local_base_freq": 1e308}, "rope_local_base_freq is 1e.308"),
    ("Gemma4", {"sliding_window": None}, "sliding_window is None"),
    ("Gemma4", {"num_kv_shared_layers": 3}, r"num_kv_shared_layers is 3.*layer 3 \(full_attention\) must have one"),
    ("Gemma4", {"per_layer_config": {"2": {"head_dim": 8}}}, "per_layer_config is .*for the layers 3"),
    ("Gemma4", {"vocab_size_per_layer_input": 7}, "vocab_size_per_layer_input is 7.*it must be vocab_size, 50"),
    ("Gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
    ("Gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
    ("GptOss", {"swiglu_limit": 6.0}, "swiglu_limit is 6.0: only 7.0"),
    ("GptOss", {"quantization_config": {"quant_method": "awq", "bits": 4}}, "MXFP4 is read of gpt-oss alone"),
    ("Lfm2", {"layer_types": None}, "layer_types is missing"),
    ("Lfm2", {"layer_types": None, "full_attn_idxs": ["1"]}, "full_attn_idxs is"),
    ("Lfm2", {"conv_L_cache": 9}, "conv_L_cache is 9.*at most 8"),
    ("Lfm2", {"block_use_swiglu": False}, "block_use_swiglu is False"),
    ("Qwen3_5", {"linear_num_value_heads": 24, "linear_num_key_heads": 16}, "linear_num_value_heads is 24.*of 16"),
    ("Qwen3_5", {"linear_key_head_dim": 512}, "linear_key_head_dim is 512.*at most 256"),
    ("Qwen3_5", {"attn_output_gate": False}, "attn_output_gate is False"),
    ("Qwen3_5", {"layer_types": ["sliding_attention"] * 4}, "layer_types is"),
    ("Qwen3Next", {"mlp_only_layers": ["1"]}, "mlp_only_layers is"),
    ("GraniteMoeHybrid", {"time_step_limit": [0.0, 1.0]}, "time_step_limit is"),
    ("GraniteMoeHybrid", {"mamba_d_head": 10}, "mamba_n_heads is 4.*must make 64"),
    ("GraniteMoeHybrid", {"position_embedding_type": "learned"}, "position_embedding_type is 'learned'"),
    ("GraniteMoeHybrid", {"mamba_n_groups": 3}, "mamba_n_heads is 4.*multiple of 3"),
    ("Bamba", {"partial_rotary_factor": 1.0}, "partial_rotary_factor is 1.0: only 0.5"),
    ("NemotronH", {"hybrid_override_pattern": "M*-E", "mlp_bias": True}, "mlp_bias is True"),
    ("NemotronH", {"hybrid_override_pattern": "M*-|"}, "hybrid_override_pattern is"),
    ("FalconH1", {"attention_bias": True}, "attention_bias is True"),
    ("FalconH1", {"mamba_d_ssm": 40}, "mamba_n_heads is 3.*must make 40, mamba_d_ssm"),
    ("FalconH1", {"ssm_multipliers": [1.0]}, "ssm_multipliers is .*a list of 5"),
    ("NemotronH", {"num_hidden_layers": 5}, "num_hidden_layers is 5: only 4"),
    ("Glm4Moe", {"n_group": 3}, "n_group is 3.*4 experts must make as many groups"),
    ("Glm4Moe", {"n_group": 2, "num_experts_per_tok": 3}, "num_experts_per_tok is 3.*at most 2"),
    ("Dots1", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
    ("Dots1", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
    ("MiniMaxM2", {"attn_type_list": [1, 0, 1, 1]}, "attn_type_list is"),
    ("Ernie4_5_Moe", {"use_bias": True}, "use_bias is True"),
    ("Ernie4_5_Moe", {"moe_layer_end_index": -2}, "moe_layer_end_index is -2"),
    ("Llama4", {"num_experts_per_tok": 2}, "num_experts_per_tok is 2: only 1"),
    ("Llama4", {"layer_types": ["sliding_attention"] * 8}, "layer_types is"),
    ("Llama4", {"layer_types": CHUNKED, "attention_chunk_size": None}, "attention_chunk_size is None"),
    ("Llama4", {"attention_chunk_size": 0}, "attention_chunk_size is 0"),
    ("Llama4", {"moe_layers": ["1"]}, "moe_layers is"),
    ("Llama4", {"no_rope_layers": [1]}, "no_rope_layers is"),
    ("Llama4", {"rope_scaling": YARN}, "use_qk_norm is True.* 1.138"),
    ("Llama4", {"floor_scale": 0}, "floor_scale is 0"),
    ("Llama4", {"hidden_size": 2**14, "intermediate_size_mlp": 2**31 - 1}, "make a matrix of"),
    ("GraniteMoeHybrid", {"hidden_size": 2**14, "mamba_expand": 2**31 - 1}, "make a matrix of"),
    ("Ministral3", {"rope_parameters": {"rope_theta": 1e4}}, "llama_4_scaling_beta is None in rope_parameters"),
    ("Exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern is 'LLLG'"),
    ("HunYuanDenseV1", {"use_cla": True}, "use_cla is True: only False"),
]


def test_what_is_not_computed_is_refused_by_name() -> None:
    for family, changes, message in REFUSED:
        with pytest.raises(UnsupportedModel, match=message):
            read_model_config(table_of(family) | changes)


# ---- which family it is, and how far it reaches


def test_qwen3_06b_in_the_schemas_of_transformers_4_and_5_and_without_a_head() -> None:
    without_head = QWEN3_06B | {"architectures": ["Qwen3Model"]}
    assert read_model_config(QWEN3_06B) == read_model_config(VERSION_5) == support.QWEN3_06B
    assert read_model_config(without_head) == support.QWEN3_06B


def test_a_family_is_known_by_what_either_field_calls_it() -> None:
    """As the first files of LLaMA were spelled; and by the model_type of transformers alone."""
    kinds = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    for name in ARCHITECTURES:
        kind = min((kind for kind, own in kinds.items() if own == name), key=len, default=None)
        for stated in ([name.upper().replace("CAUSALLM", "CausalLM")], [name.replace("Llama", "LLaMA")], None):
            if stated is None and kind in (
                None,
                "llama4",
                "hunyuan_v1_dense",
            ):  # of one that sees pictures; another word
                continue
            with pytest.raises(UnsupportedModel) as caught:
                read_model_config({"architectures": stated, "model_type": kind})
            assert "architectures" not in str(caught.value), "the family has read it, and misses its fields"


def test_an_architecture_that_is_none_is_told_why() -> None:
    for stated in (["MambaForCausalLM"], ["LlamaBidirectionalModel"], "LlamaForCausalLM", None):
        why = "none of them is supported" if isinstance(stated, list) else "it must be a list"
        with pytest.raises(UnsupportedModel, match=why):
            read_model_config({"architectures": stated})


def test_lengths_have_many_names_and_the_smallest_counts() -> None:
    alone = without("max_position_embeddings")
    for name in LENGTHS:
        assert read_model_config(alone | {name: 2048}).max_position_embeddings == 2048
        for stated, longest in ((2048, 2048), (1 << 20, 40960), (None, 40960)):
            assert read_model_config(QWEN3_06B | {name: stated}).max_position_embeddings == longest
        for wrong in (0, "long", 10**30):
            with pytest.raises(UnsupportedModel, match=f"^{name} is "):
                read_model_config(QWEN3_06B | {name: wrong})
    with pytest.raises(UnsupportedModel, match="max_position_embeddings is None"):
        read_model_config(alone)
