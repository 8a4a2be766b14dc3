"""Quantized weights: what is stored of a matrix, how it is multiplied in whole numbers, and what is lost on the way.

python examples/quantization.py

docs/quantization.md explains what is printed.
"""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from nanoengine import LLM, SamplingParams
from nanoengine.core.outputs import RequestOutput
from nanoengine.models.names import DEMO
from nanoengine.quantization.at_load import quantizer
from nanoengine.quantization.tensor import Grouped

MATRIX = "model.layers.0.self_attn.q_proj.weight"
OUTPUT, GROUP, BLOCK = 5, 32, 16
PROMPT = "def binary_search(items, target):\n    low, high = 0, len(items)\n    while low < high:\n"
WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("float32", {}),
    ("int8", {"quantization": "int8"}),
    ("int4", {"quantization": "int4"}),
    ("int4, exact", {"quantization": "int4", "activation_dtype": "float32"}),
)


def stored(matrix: Tensor) -> Grouped:
    """One group of one output."""
    quantized = quantizer("int4")(matrix)
    assert isinstance(quantized, Grouped)
    assert quantized.zeros is not None
    group = slice(0, GROUP)
    values, numbers = matrix[OUTPUT, group], quantized.numbers[OUTPUT, group]
    scale, zero = quantized.scales[OUTPUT, 0].item(), int(quantized.zeros[OUTPUT, 0])
    decoded = quantized.dequantize(torch.float32)[OUTPUT, group]
    print(f"1. {MATRIX}, output {OUTPUT}, inputs 0 to {GROUP - 1}, as int4")
    print(f"   from {values.min():.4f} to {values.max():.4f}: scale {scale:.5f}, zero {zero}")
    print(f"   weights  {shown(values)}")
    print(f"   stored   {'  '.join(f'{int(number):>7}' for number in numbers[:8])}")
    print(f"   meant    {shown(decoded)}")
    print(f"   farthest off: {(decoded - values).abs().max():.5f}, half a scale is {scale / 2:.5f}")
    return quantized


def multiplied(quantized: Grouped) -> None:
    """Half of that group times some activations, as the kernels for CPUs do it (kernels/cpp/quantized_rows.h)."""
    assert quantized.zeros is not None
    x = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0))
    step = x.abs().max() / 127
    rounded = (x / step).round().long()
    numbers, zero = quantized.numbers[OUTPUT, :BLOCK].long(), int(quantized.zeros[OUTPUT, 0])
    scale = quantized.scales[OUTPUT, 0].float()
    dot, total = int((numbers * rounded).sum()), int(rounded.sum())
    result = scale * step * (dot - zero * total)
    exact = (quantized.dequantize(torch.float32)[OUTPUT, :BLOCK] * x).sum()
    print(f"2. its first {BLOCK} inputs times {BLOCK} activations")
    print(f"   activations  {shown(x)}")
    print(f"   as bytes     {'  '.join(f'{int(number):>7}' for number in rounded[:8])}, each {step:.5f}")
    print(f"   sum of number * byte = {dot}, sum of bytes = {total}")
    print(f"   {scale:.5f} * {step:.5f} * ({dot} - {zero} * {total}) = {result:.5f}; exact: {exact:.5f}")


def compared(matrix: Tensor) -> None:
    """What is off after one matrix, by format."""
    print(f"3. all of that matrix, {list(matrix.shape)}: error over size, root mean square")
    for name in ("int8", "int4", "int4-128"):
        error = quantizer(name)(matrix).dequantize(torch.float32) - matrix
        print(f"   {name:<9} {100 * (error.norm() / matrix.norm()).item():.2f} %")


def generated() -> None:
    """How likely the prompt is (log probability), and where greedy texts part."""
    print("4. the model, by its options: log probability of a prompt, greedy text")
    first: list[int] | None = None
    for name, options in WAYS:
        with LLM("demo", dtype="float32", device="cpu", max_model_len=256, use_tqdm=False, **options) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=48, prompt_logprobs=0)
            [output] = llm.generate([PROMPT], params, use_tqdm=False)
            tokens = output.outputs[0].token_ids
            first = first or tokens
            same = next((i for i, (a, b) in enumerate(zip(first, tokens, strict=False)) if a != b), len(first))
        print(f"   {name:<12} prompt {prompt_logprob(output):.3f}; the first {same} tokens as in float32")


def prompt_logprob(output: RequestOutput) -> float:
    """The log probability of a prompt."""
    assert output.prompt_logprobs is not None
    places = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    return sum(entries[token].logprob for token, entries in places if entries is not None)


def shown(values: Tensor) -> str:
    return "  ".join(f"{value:>7.4f}" for value in values[:8].tolist())


if __name__ == "__main__":
    weights = load_file(DEMO / "model.safetensors")[MATRIX].float()
    multiplied(stored(weights))
    compared(weights)
    generated()
