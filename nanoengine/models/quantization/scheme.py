"""Scheme: the quantization_config of a model folder, in one form for all methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nanoengine.errors import UnsupportedModel, shown
from nanoengine.models.config_fields import ConfigFields, names_of

QUANTIZATION = "quantization_config"
WHERE = f"the {QUANTIZATION} of the model's config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """The storage of the quantized layers of a folder. The names of tensors determine the quantized layers.

    Attributes:
        layout: "awq", "gptq", "packed" (several numbers in a word), "bytes" (one signed number in a byte), "float8",
            "nvfp4", "nvfp4-modelopt" or "mxfp4".
        bits: of a number.
        group: adjacent inputs with one scale; None: all inputs.
        symmetric: the zero point is the middle of the range; zero points may be missing.
        zeros_less_one: stored zero points are less by 1 (GPTQ before version 2).
        block: rows and columns with one scale; None: no blocks.
        block_scales: the tensor with the scales of blocks.
        others: other schemes in the same folder; shapes and dtypes of tensors determine the scheme of a layer.
    """

    layout: str
    bits: int
    group: int | None = None
    symmetric: bool = True
    zeros_less_one: bool = False
    block: tuple[int, int] | None = None
    block_scales: str = "weight_scale"
    others: tuple[Scheme, ...] = ()


def read_scheme(table: Mapping[str, Any]) -> Scheme | None:
    """The quantization of a config.json; None if there is none.

    Raises:
        UnsupportedModel: a method that is not read, or a field of it that is missing, wrong or not known.
    """
    if table.get(QUANTIZATION) is None:
        return None
    fields = ConfigFields(ConfigFields(table).table_of(QUANTIZATION), WHERE)
    if "quant_algo" in fields:  # the only key of old ModelOpt
        fields.default(quant_method="modelopt")
    method = fields.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        why = "MLX's packing is not read; " if method is None and "bits" in fields else ""
        raise fields.wrong("quant_method", method, f"{why}supported are {', '.join(METHODS)}; {INSTEAD}")
    scheme = METHODS[method](fields)
    fields.refuse_others(names_of("quantization"))
    return scheme


INSTEAD = (
    "take a variant of the model as a GGUF file, AWQ, GPTQ or FP8, or the unquantized model, perhaps with "
    'quantization="int4"'
)


def _awq(fields: ConfigFields) -> Scheme:
    """AutoAWQ (https://github.com/casper-hansen/AutoAWQ, awq/models/_config.py), with its keys or those of transformers."""
    for key in ("version", "format", "checkpoint_format"):
        if str(fields.get(key, "gemm")).lower() != "gemm":
            raise fields.wrong(key, fields.get(key), "of AWQ, only 'gemm' is supported")
    if fields.get("backend") == "llm-awq":
        raise fields.wrong("backend", "llm-awq", "its packing is not read; convert it with AutoAWQ")
    for key in ("w_bit", "bits"):
        fields.expect(key, 4)
    fields.expect("method", "awq")
    fields.expect("pack_dtype", "int32")
    fields.ignore(*OF_GPTQ, "sym", "modules_to_not_convert", "do_fuse", "modules_to_fuse", "fuse_max_seq_len")
    group = _group(fields, "q_group_size" if "q_group_size" in fields else "group_size", 128)
    return Scheme(layout="awq", bits=4, group=group, symmetric=not fields.flag("zero_point", True))


OF_GPTQ = (
    *("desc_act", "static_groups", "true_sequential", "act_group_aware", "damp_percent", "damp_auto_increment", "mse"),
    *("model_name_or_path", "model_file_base_name", "lm_head", "meta", "quantizer", "dataset", "tokenizer", "backend"),
    *("batch_size", "pad_token_id", "model_seqlen", "max_input_length", "cache_block_outputs"),
    *("module_name_preceding_first_block", "modules_in_block_to_quantize", "use_cuda_fp16", "use_exllama"),
    *("disable_exllama", "exllama_config", "block_name_to_quantize"),
    *("iters", "autoround_version", "low_gpu_mem_usage"),
)
"""Keys of GPTQ's calibration and of other kernels; the order of inputs is in g_idx."""


def _gptq(fields: ConfigFields) -> Scheme:
    """GPTQ as AutoGPTQ and GPTQModel store it (https://github.com/ModelCloud/GPTQModel, gptqmodel/quantization/config.py)."""
    bits = fields.integer("bits")
    fields.expect("bits", 4, 8)
    fields.expect("method", "gptq")
    fields.expect("pack_dtype", "int32")
    fields.expect("data_type", "int")
    rules = fields.table_of("dynamic")
    if not all(rule.startswith("-:") for rule in rules):  # these exclude modules, as names of tensors do
        raise fields.wrong("dynamic", rules, "rules for single modules are not computed")
    fields.refuse("is_marlin_format", "only the layout of GPTQ itself is read")
    for key in ("checkpoint_format", "format"):
        fields.expect(key, "gptq", "gptq_v2")
    stored = fields.get("checkpoint_format", fields.get("format", "gptq"))
    fields.ignore(*OF_GPTQ)
    group, symmetric = _group(fields, "group_size", 128), fields.flag("sym", True)
    return Scheme(layout="gptq", bits=bits, group=group, symmetric=symmetric, zeros_less_one=stored == "gptq")


def _auto_round(fields: ConfigFields) -> Scheme:
    """AutoRound (https://github.com/intel/auto-round, auto_round/export/export_to_autoround): the tensors of GPTQ or of AWQ."""
    packing = fields.get("packing_format")
    if packing not in ("auto_round:auto_gptq", "auto_round:auto_awq"):
        raise fields.wrong("packing_format", packing, "supported are auto_round:auto_gptq and auto_round:auto_awq")
    rules = fields.table_of("extra_config")
    if any(not isinstance(rule, Mapping) or rule.get("bits", 0) != 16 for rule in rules.values()):
        raise fields.wrong("extra_config", rules, "of rules for single modules, only 16 bits are read: not quantized")
    fields.expect("act_bits", 16, 32)
    fields.ignore("act_group_size", "act_sym", "act_dynamic", "act_data_type")
    if packing == "auto_round:auto_gptq":
        return _gptq(fields)
    fields.expect("data_type", "int")
    fields.default(zero_point=not fields.flag("sym", True))
    return _awq(fields)


def _compressed_tensors(fields: ConfigFields) -> Scheme:
    """https://github.com/vllm-project/compressed-tensors, compressed_tensors/quantization/quant_config.py and quant_scheme.py."""
    fields.refuse("transform_config", "rotated weights are not computed")
    sparsity = ConfigFields(fields.table_of("sparsity_config"), f"the sparsity_config of {WHERE}")
    sparsity.expect("format", "dense")
    # No effect on stored weights: the names of tensors determine the quantized layers, and options the dtype of K/V.
    fields.ignore("ignore", "quantization_status", "global_compression_ratio", "version", "kv_cache_scheme")
    form = fields.get("format")
    groups = fields.table_of("config_groups")
    schemes = dict.fromkeys(_group_of_modules(name, group, form) for name, group in groups.items())
    if not schemes:
        raise fields.wrong("config_groups", groups, "it must have the weights of its modules")
    first, *others = schemes
    return replace(first, others=tuple(others))


def _group_of_modules(name: str, content: object, form: object) -> Scheme:
    if not isinstance(content, Mapping):
        raise UnsupportedModel(f"{shown(name)} of config_groups is {shown(content)} in {WHERE}: it must be a table")
    group = ConfigFields(content, f"{shown(name)} of the config_groups in {WHERE}")
    # Kernels quantize activations dynamically, which is more precise than static scales.
    group.ignore("targets", "input_activations")
    group.refuse("output_activations", "outputs are not rounded")
    form = group.get("format", form)
    weights = ConfigFields(group.table_of("weights"), f"the weights of {group.where}")
    group.refuse_others(names_of("quantization"))
    scheme = _weights(weights, form)
    weights.refuse_others()
    return scheme


FORMATS = {
    "pack-quantized": ("int", (4, 8), "packed"),
    "int-quantized": ("int", (8,), "bytes"),
    "float-quantized": ("float", (8,), "float8"),
    "nvfp4-pack-quantized": ("float", (4,), "nvfp4"),
}
"""Format of compressed-tensors -> type of numbers, bits they may have, layout."""


def _weights(weights: ConfigFields, form: object) -> Scheme:
    kind = weights.get("type", "int")
    if form == "naive-quantized":
        form = f"{kind}-quantized"
    if not isinstance(form, str) or form not in FORMATS:
        raise weights.wrong("format", form, f"supported are {', '.join(FORMATS)}, naive-quantized; {INSTEAD}")
    expected, bits, layout = FORMATS[form]
    weights.expect("type", expected)
    weights.expect("num_bits", *bits)
    weights.expect("dynamic", False)
    if layout == "nvfp4":
        weights.expect("group_size", 16)
        weights.expect("strategy", "tensor_group")
    else:
        weights.expect("strategy", "tensor", "channel", "block" if layout == "float8" else "group")
    # Keys of the calibration; the order of inputs is in weight_g_idx.
    weights.ignore("actorder", "observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    group = _group(weights, "group_size", 16 if layout == "nvfp4" else -1)
    strategy = weights.get("strategy", "tensor" if group is None else "group")
    symmetric = weights.flag("symmetric", True)
    if layout in ("float8", "nvfp4") and not symmetric:
        raise weights.wrong("symmetric", symmetric, "floats have no zero points")
    if (strategy in ("group", "tensor_group")) != (group is not None):
        raise weights.wrong("strategy", strategy, f"group_size is {group}")
    blocks = _block(weights, "block_structure")
    if (strategy == "block") != (blocks is not None):
        raise weights.wrong("strategy", strategy, f"block_structure is {blocks}")
    return Scheme(layout=layout, bits=weights.integer("num_bits", 8), group=group, symmetric=symmetric, block=blocks)


def _fp8(fields: ConfigFields) -> Scheme:
    """vLLM's and AutoFP8's (https://github.com/neuralmagic/AutoFP8), and with blocks DeepSeek-V3's."""
    fields.expect("activation_scheme", "dynamic", "static")
    fields.expect("fmt", "e4m3", "float8_e4m3fn")
    fields.ignore("kv_cache_scheme", "scale_fmt")
    fields.ignore("ignored_layers", "ignore_patterns", "modules_to_not_convert", "modules_to_convert")
    fields.expect("dequantize", False)
    block = _block(fields, "weight_block_size")
    return Scheme(layout="float8", bits=8, block=block, block_scales="weight_scale_inv")


def _modelopt(fields: ConfigFields) -> Scheme:
    """NVIDIA's ModelOpt (https://github.com/NVIDIA/Model-Optimizer, modelopt/torch/export)."""
    fields.ignore("producer", "config_groups", "ignore", "exclude_modules", "quantized_layers")
    fields.ignore("kv_cache_scheme", "kv_cache_quant_algo")
    floats8, floats4 = Scheme(layout="float8", bits=8), Scheme(layout="nvfp4-modelopt", bits=4, group=16)
    known = {"FP8": floats8, "NVFP4": floats4, "MIXED_PRECISION": replace(floats4, others=(floats8,))}
    algorithm = fields.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm not in known:
        raise fields.wrong("quant_algo", algorithm, f"supported are {', '.join(known)}; {INSTEAD}")
    fields.expect("group_size", 16)
    return known[algorithm]


def _mxfp4(fields: ConfigFields) -> Scheme:
    """gpt-oss (https://huggingface.co/openai/gpt-oss-20b/blob/main/config.json)."""
    fields.ignore("modules_to_not_convert")
    return Scheme(layout="mxfp4", bits=4, group=32)


METHODS = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "auto-round": _auto_round,
    "mxfp4": _mxfp4,
}


def _group(fields: ConfigFields, key: str, default: int) -> int | None:
    return None if fields.get(key, default) == -1 else fields.integer(key, default)


def _block(fields: ConfigFields, key: str) -> tuple[int, int] | None:
    sizes = fields.get(key)
    if sizes is None:
        return None
    if isinstance(sizes, list) and len(sizes) == 2:
        rows, columns = (ConfigFields({key: size}, fields.where).integer(key) for size in sizes)
        return rows, columns
    raise fields.wrong(key, sizes, "it must be a list of two sizes")
