"""Model folders with quantized layers, packed number by number as the formats are published, beside what they stand for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

AWQ_SLOTS = (0, 4, 1, 5, 2, 6, 3, 7)
"""Of each output of eight, which 4 bits of a word it has (AutoAWQ: awq/modules/linear/gemm.py)."""

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Drawn:
    """A matrix before it is packed: w[o, i] = scales[o, g] * (numbers[o, i] - zeros[o, g])."""

    numbers: Tensor  # [outputs, inputs]
    scales: Tensor  # [outputs, groups]
    zeros: Tensor  # [outputs, groups]
    bits: int

    def dense(self) -> Tensor:
        group = self.numbers.shape[1] // self.scales.shape[1]
        scales, zeros = (part.repeat_interleave(group, 1) for part in (self.scales.float(), self.zeros))
        return scales * (self.numbers - zeros)


def draw(outputs: int, inputs: int, bits: int, group: int | None, symmetric: bool, dtype: torch.dtype) -> Drawn:
    """A matrix whose products are about as large as what is multiplied."""
    groups = 1 if group is None else inputs // group
    numbers = torch.randint(0, 2**bits, (outputs, inputs))
    zeros = torch.full((outputs, groups), 2 ** (bits - 1))
    if not symmetric:  # all that a file can say, but those at the ends are rare
        zeros = torch.randint(1, 2**bits, (outputs, groups))
    scales = (0.5 + torch.rand(outputs, groups)) * inputs**-0.5 * 4 / 2**bits
    return Drawn(numbers, scales.to(dtype), zeros, bits)


def words(numbers: Tensor, bits: int, slots: Sequence[int] = range(8)) -> Tensor:
    """int32 [rows, words]: of the neighbours in a row of a word, the number i has the `bits` from `bits * slots[i]` on."""
    each = 32 // bits
    table = torch.zeros(len(numbers), -(-numbers.shape[1] // each), dtype=torch.int64)
    for column, values in enumerate(numbers.T):
        table[:, column // each] |= values << bits * slots[column % each]
    return table.to(torch.int32)  # wraps


def mxfp4_folder(original: Path, folder: Path) -> Path:
    """A gpt-oss with any MXFP4 numbers as experts, and in `folder`/dense the same model in float32, as transformers reads it."""
    (folder / "dense").mkdir(parents=True)
    for file in original.iterdir():
        for target in (folder, folder / "dense"):
            shutil.copy(file, target)
    tensors = load_file(folder / "model.safetensors")
    dense = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(122, 126, (experts, outputs, inputs // 32), dtype=torch.uint8)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        dense[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, folder / "model.safetensors")
    save_file(dense, folder / "dense" / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def cells(matrix: Tensor) -> list[tuple[int, int, int]]:
    return [(row, column, int(value)) for row, line in enumerate(matrix.tolist()) for column, value in enumerate(line)]


def awq(drawn: Drawn) -> Tensors:
    return {
        "qweight": words(drawn.numbers.T, 4, AWQ_SLOTS),
        "qzeros": words(drawn.zeros.T, 4, AWQ_SLOTS),
        "scales": drawn.scales.t().contiguous(),
    }


def gptq(drawn: Drawn, less: int = 1) -> Tensors:
    inputs, groups = drawn.numbers.shape[1], drawn.scales.shape[1]
    return {
        "qweight": words(drawn.numbers, drawn.bits).T.contiguous(),
        "qzeros": words(drawn.zeros.T - less, drawn.bits),
        "scales": drawn.scales.t().contiguous(),
        "g_idx": torch.tensor([i // (inputs // groups) for i in range(inputs)], dtype=torch.int32),
    }


def packed(drawn: Drawn) -> Tensors:
    tensors = {
        "weight_packed": words(drawn.numbers, drawn.bits),
        "weight_scale": drawn.scales,
        "weight_shape": torch.tensor(drawn.numbers.shape),
    }
    if bool((drawn.zeros != 2 ** (drawn.bits - 1)).any()):
        tensors["weight_zero_point"] = words(drawn.zeros.T, drawn.bits).T.contiguous()
    return tensors


def in_bytes(drawn: Drawn) -> Tensors:
    tensors = {"weight": (drawn.numbers - 128).to(torch.int8), "weight_scale": drawn.scales}
    if bool((drawn.zeros != 128).any()):
        tensors["weight_zero_point"] = (drawn.zeros - 128).to(torch.int8)
    return tensors


Maker = Callable[[int, int], tuple[Tensors, Tensor]]
"""Outputs and inputs -> the tensors of a layer, by suffix, and the matrix that they stand for."""


def whole_numbers(
    pack: Callable[[Drawn], Tensors], bits: int, group: int | None, symmetric: bool, dtype: torch.dtype = torch.float16
) -> Maker:
    def make(outputs: int, inputs: int) -> tuple[Tensors, Tensor]:
        drawn = draw(outputs, inputs, bits, group, symmetric, dtype)
        return pack(drawn), drawn.dense()

    return make


def floats(scale_shape: Callable[[int, int], tuple[int, ...]], name: str = "weight_scale", **others: Tensor) -> Maker:
    """Floats of 8 bits; scales [rows, columns] belong to blocks of 16 x 16 if they are weight_scale_inv."""

    def make(outputs: int, inputs: int) -> tuple[Tensors, Tensor]:
        numbers = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
        scales = (0.5 + torch.rand(scale_shape(outputs, inputs))) * inputs**-0.5
        dense = numbers.float()
        for o, i, _ in cells(dense):
            scale = scales[o // 16, i // 16] if name == "weight_scale_inv" else scales.expand(outputs, 1)[o]
            dense[o, i] *= float(scale)
        return {"weight": numbers, name: scales, **others}, dense

    return make


E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def nvfp4(divides: bool) -> Maker:
    """As compressed-tensors stores it, whose scale of the whole matrix divides, or as ModelOpt does, whose scale multiplies."""

    def make(outputs: int, inputs: int) -> tuple[Tensors, Tensor]:
        numbers = torch.randint(0, 16, (outputs, inputs))
        scales = (50 + 398 * torch.rand(outputs, inputs // 16)).to(torch.float8_e4m3fn)
        factor = torch.tensor([inputs**-0.5 / 800])
        stored = 1 / factor if divides else factor
        exact = 1 / stored.double() if divides else stored.double()
        dense = torch.empty(outputs, inputs, dtype=torch.float64)
        for o, i, number in cells(numbers):
            dense[o, i] = E2M1[number] * float(scales[o, i // 16]) * exact
        body = (numbers[:, ::2] | numbers[:, 1::2] << 4).to(torch.uint8)
        names = ("weight_packed", "weight_global_scale") if divides else ("weight", "weight_scale_2")
        inputs_scale = {"input_global_scale" if divides else "input_scale": torch.tensor([0.3])}
        return {names[0]: body, "weight_scale": scales, names[1]: stored, **inputs_scale}, dense.float()

    return make


def compressed(form: str, **weights: object) -> dict[str, Any]:
    args = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "observer": "minmax", **weights}
    group = {"targets": ["Linear"], "weights": args, "input_activations": None, "output_activations": None}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return config | {"ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed"}


@dataclass(frozen=True)
class Form:
    """A format: the quantization_config that says it, and how a layer is stored."""

    config: dict[str, Any]
    make: Maker


def awq_form(group: int = 16, zero_point: bool = True) -> Form:
    config = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": group, "zero_point": zero_point}
    return Form(config, whole_numbers(awq, 4, None if group == -1 else group, not zero_point))


def gptq_form(bits: int = 4, group: int = 16, sym: bool = True, version: int = 1, **config: object) -> Form:
    stored = "gptq" if version == 1 else "gptq_v2"
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": False, **config}
    make = whole_numbers(lambda drawn: gptq(drawn, 2 - version), bits, None if group == -1 else group, sym)
    return Form({"checkpoint_format": stored, "damp_percent": 0.01, "lm_head": False, **config}, make)


def packed_form(bits: int = 4, group: int | None = 16, symmetric: bool = True) -> Form:
    how = {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    config = compressed("pack-quantized", num_bits=bits, symmetric=symmetric, **how)
    return Form(config, whole_numbers(packed, bits, group, symmetric, torch.bfloat16))


def bytes_form(symmetric: bool = True) -> Form:
    config = compressed("int-quantized", strategy="channel", symmetric=symmetric)
    return Form(config, whole_numbers(in_bytes, 8, None, symmetric, torch.float32))


FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [16, 16]}
A_TENSOR = compressed("float-quantized", type="float", strategy="tensor")
FP4 = compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "producer": {"name": "modelopt"}, "ignore": ["lm_head"]}
A_ROW = compressed("naive-quantized", type="float", strategy="channel")

FORMS = {
    "AWQ": awq_form(),
    "AWQ, whole rows": awq_form(group=-1),
    "AWQ, no zeros": awq_form(zero_point=False),
    "GPTQ": gptq_form(),
    "GPTQ, zeros": gptq_form(sym=False),
    "GPTQ, 8 bits": gptq_form(bits=8, sym=False),
    "GPTQ 2, whole rows": gptq_form(group=-1, version=2, sym=False, desc_act=True),
    "GPTQ 2, 8 bits": gptq_form(bits=8, version=2),
    "packed": packed_form(),
    "packed, zeros": packed_form(symmetric=False),
    "packed, 8 bits": packed_form(bits=8, symmetric=False),
    "packed, a scale a row": packed_form(group=None),
    "bytes": bytes_form(),
    "bytes, zeros": bytes_form(symmetric=False),
    "floats, a scale": Form(A_TENSOR, floats(lambda _o, _i: (1,))),
    "floats, a scale a row": Form(A_ROW, floats(lambda o, _: (o, 1))),
    "fp8, a scale, static inputs": Form(FP8, floats(lambda _o, _i: (), input_scale=torch.tensor(0.1))),
    "fp8, blocks": Form(BLOCKS, floats(lambda o, i: (-(-o // 16), -(-i // 16)), "weight_scale_inv")),
    "NVFP4": Form(FP4, nvfp4(divides=True)),
    "NVFP4 of ModelOpt": Form(MODELOPT, nvfp4(divides=False)),
}


def mixed(*names: str) -> Form:
    """Several groups of modules in one folder of compressed-tensors; a matrix of another shape is of the next one."""
    forms = [FORMS[name] for name in names]
    shapes: list[tuple[int, int]] = []

    def make(outputs: int, inputs: int) -> tuple[Tensors, Tensor]:
        if (outputs, inputs) not in shapes:
            shapes.append((outputs, inputs))
        return forms[shapes.index((outputs, inputs)) % len(forms)].make(outputs, inputs)

    groups = {
        f"group_{i}": form.config["config_groups"]["group_0"] | {"format": form.config["format"]}
        for i, form in enumerate(forms)
    }
    return Form(forms[0].config | {"format": "mixed-precision", "config_groups": groups}, make)


MIXED = {
    "4 bits and 8 bits": mixed("packed", "packed, 8 bits"),
    "NVFP4, floats of 8 bits and words": mixed("NVFP4", "floats, a scale", "packed, zeros", "packed"),
}


def is_quantized(name: str) -> bool:
    """Whether quantizers take it: the products of the layers, the router of experts excepted."""
    return name.endswith("_proj.weight")


def pack_folder(
    original: Path,
    folder: Path,
    form: Form,
    files: int = 1,
    seed: int = 0,
    chosen: Callable[[str, Tensor], bool] = lambda name, _: is_quantized(name),
) -> Path:
    """A folder with the linear layers of another one drawn anew, and stored in a format; `folder / "dense"` has the same numbers.

    The tensors of a layer are dealt out to that many files.
    """
    torch.manual_seed(seed)
    shutil.copytree(original, folder)
    shutil.copytree(original, folder / "dense")
    tensors = load_file(original / "model.safetensors")
    stored: Tensors = {}
    for name, tensor in list(tensors.items()):
        if chosen(name, tensor):
            parts, tensors[name] = form.make(*tensor.shape)
            stored |= {f"{name.removesuffix('weight')}{suffix}": part for suffix, part in parts.items()}
        else:
            stored[name] = tensor
    save_file(tensors, folder / "dense" / "model.safetensors", {"format": "pt"})
    (folder / "model.safetensors").unlink()
    for number in range(files):
        chosen = {name: t.clone() for i, (name, t) in enumerate(stored.items()) if i % files == number}
        save_file(chosen, folder / f"model-{number}.safetensors")
    edit_config(folder, quantization_config=form.config)
    return folder


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, edit: Callable[[Tensors], object]) -> None:
    """Change the tensors of a folder that has one file."""
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
