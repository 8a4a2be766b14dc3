"""What a quantization_config may say: every method in its own words, and what is not computed refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nanoengine.errors import UnsupportedModel
from nanoengine.models.architectures import read_model_config
from nanoengine.models.quantization.scheme import Scheme, read_scheme
from tests.models.configs import QWEN3_06B
from tests.models.quantization.packed_models import (
    A_ROW,
    A_TENSOR,
    BLOCKS,
    FORMS,
    FP4,
    FP8,
    MIXED,
    MODELOPT,
    compressed,
)

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
OLD_AWQ = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": False, "version": "GEMM"}
NVFP4, AWQ_EVEN = Scheme(layout="nvfp4", bits=4, group=16), Scheme(layout="awq", bits=4, group=128)
OF_MIXED = (
    Scheme(layout="float8", bits=8),
    Scheme(layout="packed", bits=4, group=16, symmetric=False),
    Scheme(layout="packed", bits=4, group=16),
)
AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 128}
AUTO_ROUND |= {"sym": True, "data_type": "int", "autoround_version": "0.9.0", "iters": 200, "seqlen": 2048}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}


def read(config: object) -> Scheme | None:
    return read_scheme({"quantization_config": config})


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (AWQ, Scheme(layout="awq", bits=4, group=128, symmetric=False)),
        (OLD_AWQ, Scheme(layout="awq", bits=4, group=64)),
        (AWQ | {"group_size": -1}, Scheme(layout="awq", bits=4, symmetric=False)),
        (GPTQ, Scheme(layout="gptq", bits=4, group=128, zeros_less_one=True)),
        (GPTQ | {"checkpoint_format": "gptq_v2"}, Scheme(layout="gptq", bits=4, group=128)),
        (GPTQ | {"format": "gptq_v2", "sym": False}, Scheme(layout="gptq", bits=4, group=128, symmetric=False)),
        (GPTQ | {"bits": 8, "group_size": -1}, Scheme(layout="gptq", bits=8, zeros_less_one=True)),
        (
            compressed("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False),
            Scheme(layout="packed", bits=4, group=32, symmetric=False),
        ),
        (compressed("pack-quantized", strategy="channel", group_size=-1), Scheme(layout="packed", bits=8)),
        (compressed("int-quantized", strategy="channel"), Scheme(layout="bytes", bits=8)),
        (compressed("naive-quantized", strategy="channel"), Scheme(layout="bytes", bits=8)),
        (A_TENSOR, Scheme(layout="float8", bits=8)),
        (A_ROW, Scheme(layout="float8", bits=8)),
        (
            compressed("float-quantized", type="float", strategy="block", block_structure=[128, 128]),
            Scheme(layout="float8", bits=8, block=(128, 128)),
        ),
        (FP8, Scheme(layout="float8", bits=8, block_scales="weight_scale_inv")),
        (BLOCKS, Scheme(layout="float8", bits=8, block=(16, 16), block_scales="weight_scale_inv")),
        (FP4, NVFP4),
        (MODELOPT, Scheme(layout="nvfp4-modelopt", bits=4, group=16)),
        (MODELOPT | {"quant_algo": "FP8"}, Scheme(layout="float8", bits=8)),
        (
            MODELOPT | {"quant_algo": "MIXED_PRECISION", "kv_cache_scheme": {"num_bits": 8}},
            Scheme(layout="nvfp4-modelopt", bits=4, group=16, others=(Scheme(layout="float8", bits=8),)),
        ),
        (MIXED["NVFP4, floats of 8 bits and words"].config, replace(NVFP4, others=OF_MIXED)),
        (AUTO_ROUND, Scheme(layout="gptq", bits=4, group=128, zeros_less_one=True)),
        (AUTO_ROUND | {"extra_config": {"lm_head": {"bits": 16}}, "packing_format": "auto_round:auto_awq"}, AWQ_EVEN),
        (GPTQ | {"dynamic": {"-:.*visual.*": {}}}, Scheme(layout="gptq", bits=4, group=128, zeros_less_one=True)),
        (A_TENSOR | {"kv_cache_scheme": {"num_bits": 8}}, Scheme(layout="float8", bits=8)),
    ],
    ids=str,
)
def test_every_method_is_read(config: dict[str, Any], expected: Scheme) -> None:
    assert read(config) == expected


def test_a_model_says_what_it_is_whether_it_is_quantized_or_not() -> None:
    plain = read_model_config(QWEN3_06B)
    assert read_scheme(QWEN3_06B) is None
    for form in FORMS.values():
        assert read_model_config(QWEN3_06B | {"quantization_config": form.config}) == plain


def test_what_quantizers_write_beside_it_is_no_matter() -> None:
    by_optimum = {"batch_size": 1, "block_name_to_quantize": None, "cache_block_outputs": True, "damp_percent": 0.01}
    by_optimum |= {"dataset": None, "exllama_config": {"version": 1}, "max_input_length": None, "model_seqlen": None}
    by_optimum |= {"pad_token_id": None, "tokenizer": None, "true_sequential": True, "use_exllama": True}
    by_gptqmodel = {"lm_head": False, "meta": {"quantizer": ["gptqmodel:7.7.0"]}, "pack_dtype": "int32", "dynamic": {}}
    by_autoround = {"provider": "auto-round", "nsamples": 128, "seqlen": 2048}
    assert read(GPTQ | by_autoround) == read(GPTQ)
    assert read(group_of(scheme_name="W4A16")) == read(group_of())
    assert read(GPTQ | by_optimum) == read(GPTQ | by_gptqmodel | {"method": "gptq", "format": "gptq"}) == read(GPTQ)
    by_autoawq = {"modules_to_not_convert": ["visual"], "do_fuse": False, "fuse_max_seq_len": None}
    assert read(AWQ | by_autoawq) == read(AWQ | by_gptqmodel | {"method": "awq", "format": "gemm"}) == read(AWQ)
    inputs = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    static = group_of("float-quantized", weights={"num_bits": 8, "type": "float", "strategy": "tensor"})
    static["config_groups"]["group_0"]["input_activations"] = inputs
    static |= {
        "quantization_status": "frozen",
        "global_compression_ratio": 1.5,
        "version": "0.12",
        "transform_config": {},
    }
    assert read(static | {"sparsity_config": {"format": "dense", "targets": []}}) == read(A_TENSOR)


def group_of(form: str = "pack-quantized", **changes: Any) -> dict[str, Any]:
    config = compressed(form, num_bits=4, strategy="group", group_size=32)
    config["config_groups"]["group_0"] |= changes
    return config


OTHERS = ("bitsandbytes", "aqlm", "torchao", "quark", "hqq", "exl3", "fbgemm_fp8")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r"quant_method is None in the quantization_config .*supported are awq, gptq, compressed-tensors, fp8"),
        *(
            ({"quant_method": name}, f"quant_method is '{name}'.*take a variant of the model as a GGUF file")
            for name in OTHERS
        ),
        ({"group_size": 64, "bits": 4}, "quant_method is None.*a folder of MLX"),
        ({"quant_method": ["awq"]}, r"quant_method is \['awq'\]"),
        ("awq", "quantization_config is 'awq'.*must be a table"),
        (AWQ | {"version": "gemv"}, "version is 'gemv'.*only 'gemm'"),
        (AWQ | {"bits": 3}, "bits is 3: only 4"),
        (AWQ | {"backend": "llm-awq"}, "backend is 'llm-awq'"),
        (AWQ | {"group_size": 0}, "group_size is 0.*positive"),
        (AWQ | {"zero_point": "yes"}, "zero_point is 'yes'"),
        (AWQ | {"rotation": "hadamard"}, "'rotation' is 'hadamard'.*not known"),
        (GPTQ | {"bits": 3}, "bits is 3: only 4 or 8"),
        ({**GPTQ, "bits": None}, "bits is None"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format is True"),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype is 'int16'"),
        (GPTQ | {"dynamic": {"-:lm_head": {}, "+:mlp": {"bits": 8}}}, "dynamic is .*single modules"),
        (AUTO_ROUND | {"packing_format": "auto_round:auto_other"}, "packing_format is 'auto_round:auto_other'"),
        (AUTO_ROUND | {"extra_config": {"lm_head": {"bits": 8}}}, "extra_config is .*single modules"),
        (MODELOPT | {"quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'.*supported are FP8, NVFP4"),
        (GPTQ | {"group_size": -2}, "group_size is -2"),
        (compressed("marlin-24"), "format is 'marlin-24'.*supported are pack-quantized"),
        (compressed("mxfp4-pack-quantized"), "format is 'mxfp4-pack-quantized'.*GGUF file"),
        (compressed("nvfp4-pack-quantized"), "type is 'int': only 'float'"),
        (compressed("pack-quantized", num_bits=3), "num_bits is 3: only 4 or 8"),
        (compressed("int-quantized", num_bits=4), "num_bits is 4: only 8"),
        (compressed("float-quantized"), "type is 'int': only 'float'"),
        (compressed("float-quantized", type="float", strategy="group", group_size=32), "strategy is 'group'"),
        (
            compressed("float-quantized", type="float", strategy="channel", symmetric=False),
            "floats have no zero points",
        ),
        (compressed("pack-quantized", strategy="group"), "strategy is 'group'.*group_size is None"),
        (compressed("float-quantized", type="float", strategy="block"), "strategy is 'block'.*block_structure is None"),
        (compressed("float-quantized", type="float", block_structure=[128]), r"block_structure is \[128\].*two sizes"),
        (compressed("pack-quantized", dynamic=True), "dynamic is True"),
        (compressed("pack-quantized", strategy="channel", rounding="up"), "'rounding' is 'up'.*not known"),
        (A_TENSOR | {"transform_config": {"config_groups": {"r1": {}}}}, "transform_config is .*rotated"),
        (A_TENSOR | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparse-24-bitmask': only 'dense'"),
        (A_TENSOR | {"config_groups": {}}, r"config_groups is \{\}"),
        (A_TENSOR | {"config_groups": {"group_0": ["Linear"]}}, r"'group_0' of config_groups is \['Linear'\]"),
        (A_TENSOR | {"config_groups": {"group_0": {"weights": 4}}}, "weights is 4.*must be a table"),
        (group_of(output_activations={"num_bits": 8}), "output_activations is .*not rounded"),
        (group_of(format="dense"), "format is 'dense'"),
        (FP8 | {"activation_scheme": "block"}, "activation_scheme is 'block'"),
        (FP8 | {"fmt": "e5m2"}, "fmt is 'e5m2'"),
        (FP8 | {"weight_block_size": [128, 0]}, "weight_block_size is 0"),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused_by_name(config: object, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read(config)
    with pytest.raises(UnsupportedModel, match=message):
        read_model_config(QWEN3_06B | {"quantization_config": config})


@pytest.mark.parametrize("key", ["format", "targets"])
def test_groups_of_modules_that_are_stored_alike_are_one(key: str) -> None:
    other = {"format": "pack-quantized", "targets": ["re:.*down_proj"]}[key]
    config = group_of()
    config["config_groups"]["group_1"] = config["config_groups"]["group_0"] | {key: other}
    assert read(config) == Scheme(layout="packed", bits=4, group=32)
