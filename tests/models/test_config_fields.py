"""What a config.json may hold: values of the wrong kind or size and fields that are not known are refused by name."""

from __future__ import annotations

import re
from typing import Any

import pytest

from nanoengine.errors import UnsupportedModel
from nanoengine.models.architectures import read_model_config
from tests.models.configs import QWEN3_06B, without

NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
NEEDED += ("max_position_embeddings",)
SIZES = (*NEEDED, "num_key_value_heads", "head_dim")
OF_OTHERS = ("attn_logit_softcapping", "embedding_multiplier", "mlp_bias")
ARCHITECTURES: list[Any] = [["GPT2LMHeadModel"], ["PaliGemmaForConditionalGeneration", 7], [], {}, "Qwen3ForCausalLM"]

REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({key: value}, key) for key in SIZES for value in (0, -1, 1.5, "8", True, [8])),
    *(
        ({key: size}, rf"{key} is \d+.* config.json: it must be a positive integer, at most \d+")
        for key in SIZES
        for size in (10**11, 10**100)
    ),
    *(({"rms_norm_eps": eps}, "rms_norm_eps") for eps in ("small", None, [1], 10**400)),
    # transformers reads them of some type of model.
    *(
        ({"model_type": "one of a plugin", key: value}, f"'{key}' is .*: this field is not known.*take it out")
        for key in OF_OTHERS
        for value in (True, 30.0, "yes", [1], {"a": 1})
    ),
    *(({"architectures": value}, "supported are .*GptOss") for value in ARCHITECTURES),
    # Of another family, which transformers would take for it.
    (
        {"architectures": ["LlamaForCausalLM"], "model_type": "granite", "residual_multiplier": 0.2},
        "residual_multiplier",
    ),
    ({"hidden_size": 2**30, "intermediate_size": 2**30}, r"make a matrix of \d+ weights: at most \d+ can be"),
    ({"head_dim": 127}, "head_dim is 127"),
    ({"num_key_value_heads": 3}, r"num_attention_heads is 16.*num_key_value_heads \(3\)"),
    ({"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
    ({"quantization_config": {}}, "quantization_config"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
]


def test_what_is_wrong_or_not_computed_is_refused_by_name() -> None:
    for changes, message in REFUSED:
        with pytest.raises(UnsupportedModel, match=message):
            read_model_config(QWEN3_06B | changes)


@pytest.mark.parametrize("key", NEEDED)
def test_a_missing_size_is_named(key: str) -> None:
    with pytest.raises(UnsupportedModel, match=re.escape(f"{key} is None")):
        read_model_config(without(key))
    with pytest.raises(UnsupportedModel, match="architectures"):
        read_model_config({})


@pytest.mark.parametrize("off", [None, False, 0, 0.0, "", [], {}], ids=str)
def test_keys_that_say_nothing_about_the_computation_are_no_matter(off: object) -> None:
    inert = {"auto_map": {"AutoModel": "modeling.Evil"}, "attention_dropout": 0.5, "_name_or_path": object()}
    inert |= {"max_length": 20, "some_feature": off}
    assert read_model_config(QWEN3_06B | inert) == read_model_config(QWEN3_06B)


def test_fields_that_transformers_does_not_read_either_are_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    notes = {f"note_{number}": number for number in range(1, 8)} | {"embedding_multiplier": 12.0}
    for _ in range(2):
        assert read_model_config(QWEN3_06B | notes) == read_model_config(QWEN3_06B)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert re.search(r"config.json has 'note_1' \(1\), .*'note_5' \(5\) and 3 more", caplog.text)


def test_what_is_left_out_is_the_familys_own_default() -> None:
    for config in (without("head_dim"), QWEN3_06B | {"head_dim": None}):
        assert read_model_config(config | {"hidden_size": 512}).head_dim == 128
    assert read_model_config(without("torch_dtype")).dtype == "float32"
    for key in ("dtype", "torch_dtype"):
        for dtype in ("float32", "bfloat16", "float16", "torch.float16"):
            assert read_model_config(without("torch_dtype") | {key: dtype}).dtype == dtype.removeprefix("torch.")
