"""What is computed row by row, each kernel alone: norms, gates and products of a layer, places of tokens, and sampling."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.kernel_bench import Bench
from nanoengine.core.sampling import SamplingTable
from nanoengine.kernels.interface import Kernels, Weight
from nanoengine.models.options import QUANTIZATIONS
from nanoengine.quantization.at_load import quantizer

SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "draw": {"temperature": 0.6},
    "top_k + top_p": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
}

FEW_ROWS = (1, 2, 4, 8, 16)
"""Rows of a step of few sequences, whose products only read weights."""

MORE_THAN_ANY_CACHE = 256 << 20
"""Bytes of weights that are read in turn, so that each is read from memory."""


def rows_of_a_layer(bench: Bench) -> None:
    """What is done number by number: the norms, and the gate of SwiGLU."""
    hidden, inner = bench.model.hidden_size, bench.model.intermediate_size
    weight = torch.ones(hidden, device=bench.device)
    for rows in bench.args.rows:
        x, residual = bench.random(rows, hidden), bench.random(rows, hidden)
        work = partial(bench.kernels.add_rms_norm, x, residual, weight, 1e-6)
        bench.add_small({"kernel": "add_rms_norm", "rows": rows}, [work], 4 * x.nbytes + weight.nbytes)
    if bench.kernels.name != "triton":
        bench.report.warn("left out: gate_and_multiply, which is part of a product in the kernels that run here")
        return
    from nanoengine.kernels.triton.activation import gate_and_multiply

    for rows in bench.args.rows:
        gate_up = bench.random(rows, 2 * inner)
        gate = partial(gate_and_multiply, gate_up, "silu")
        bench.add_small({"kernel": "gate_and_multiply", "rows": rows}, [gate], 1.5 * gate_up.nbytes)


def matrices(bench: Bench) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the products of a layer, and of the logits."""
    model = bench.model
    hidden, inner = model.hidden_size, model.intermediate_size
    return {
        "q, k, v": (bench.qkv_width, hidden),
        "attention's output": (hidden, model.num_heads * model.head_dim),
        "gate and up": (2 * inner, hidden),
        "down": (hidden, inner),
        "logits": (model.vocab_size, hidden),
    }


def products(bench: Bench) -> None:
    """The matrix products as the engine has them computed, in a large step."""
    for name, (outputs, inputs) in matrices(bench).items():
        weight = _weight(bench, outputs, inputs)
        for rows in bench.args.batch if name == "logits" else bench.args.rows:
            x = bench.random(rows, inputs)
            work: Callable[[], object] = partial(bench.kernels.linear, x, weight, None)
            result_bytes = bench.dtype.itemsize
            if name == "logits":
                work, result_bytes = partial(bench.kernels.logits, x, weight), torch.float32.itemsize
            num_bytes = x.nbytes + inputs * outputs * bench.dtype.itemsize + rows * outputs * result_bytes
            bench.add({"kernel": f"product: {name}", "rows": rows}, work, num_bytes, 2 * rows * inputs * outputs)


def products_of_few_rows(bench: Bench) -> None:
    """One after the other as in a recorded step: as the engine has them computed, with the norm before them and the gate behind
    them, and what torch's library makes of the product alone: what our own kernels have to beat.
    """
    for name, (outputs, inputs) in matrices(bench).items():
        copies = (
            2 if bench.device.type == "cpu" else -(-MORE_THAN_ANY_CACHE // (outputs * inputs * bench.dtype.itemsize))
        )
        weights = [_weight(bench, outputs, inputs) for _ in range(copies)]
        norm = torch.ones(inputs, device=bench.device)
        for rows in FEW_ROWS:
            x, residual = bench.random(rows, inputs), bench.random(rows, inputs)
            num_bytes = x.nbytes + outputs * inputs * bench.dtype.itemsize + rows * outputs * bench.dtype.itemsize
            flop = 2 * rows * inputs * outputs
            works: list[Callable[[], object]] = [partial(torch.mm, x, _numbers(weight).T) for weight in weights]
            bench.add_small({"kernel": f"torch.mm: {name}", "rows": rows}, works, num_bytes, flop)
            works = [partial(_as_in_a_step, bench.kernels, name, x, residual, norm, weight) for weight in weights]
            bench.add_small({"kernel": f"as in a step: {name}", "rows": rows}, works, num_bytes, flop)


def quantized_products(bench: Bench) -> None:
    """The same of quantized weights, in every format; a weight's bytes are those that it has then."""
    for (name, (outputs, inputs)), format in product(matrices(bench).items(), QUANTIZATIONS):
        numbers = bench.random(outputs, inputs)
        quantized = quantizer(format)(numbers)
        copies = 2 if bench.device.type == "cpu" else -(-MORE_THAN_ANY_CACHE // (outputs * inputs // 2))
        weights = [bench.kernels.new_weight(outputs, inputs, bench.dtype, bench.device) for _ in range(copies)]
        for weight in weights:
            weight.rows(0, outputs).copy_quantized(quantized)
        norm = torch.ones(inputs, device=bench.device)
        bits = 4.75 if format.startswith("int4") else 8  # of 32 numbers of 4 bits, 24 more bits are a scale and a zero
        for rows in (1, 16):
            x, residual = bench.random(rows, inputs), bench.random(rows, inputs)
            num_bytes = x.nbytes + outputs * inputs * bits / 8 + rows * outputs * bench.dtype.itemsize
            works = [partial(_as_in_a_step, bench.kernels, name, x, residual, norm, weight) for weight in weights]
            case = {"kernel": f"quantized: {name}", "format": format, "rows": rows}
            bench.add_small(case, works, num_bytes, 2 * rows * inputs * outputs)


def _as_in_a_step(kernels: Kernels, name: str, x: Tensor, residual: Tensor, norm: Tensor, weight: Weight) -> None:
    if name == "q, k, v":
        kernels.norm_linear(x, residual, norm, 1e-6, weight, None)
    elif name == "gate and up":
        kernels.norm_gated_linear(x, residual, norm, 1e-6, weight)
    elif name == "logits":
        kernels.logits(x, weight)
    else:
        kernels.linear(x, weight, None)


def _weight(bench: Bench, outputs: int, inputs: int) -> Any:
    weight = bench.kernels.new_weight(outputs, inputs, bench.dtype, bench.device)
    weight.rows(0, outputs).copy_(bench.random(outputs, inputs))
    return weight


def _numbers(weight: Any) -> Tensor:
    """Kernels for GPUs learn the format of a weight from its rows, and keep it apart."""
    found: Tensor = getattr(weight, "content", weight).tensor
    return found


def placing(bench: Bench) -> None:
    """Positions, slots and tokens of a decode step."""
    block_size = bench.args.block_size
    width = max(bench.args.context) // block_size + 1
    for batch in bench.args.batch:
        rows = torch.arange(batch, dtype=torch.int32, device=bench.device)
        starts = torch.arange(batch + 1, dtype=torch.int32, device=bench.device)
        tables = torch.randint(1, 1000, (1, batch + 1, width), dtype=torch.int32, device=bench.device)
        last_tokens = torch.zeros(batch + 1, dtype=torch.int64, device=bench.device)
        unknown, computed = torch.full_like(rows, -1), torch.full_like(rows, block_size)
        work = partial(
            bench.kernels.compute_slot_mapping, unknown, rows, starts, computed, last_tokens, tables, block_size, 1
        )
        num_bytes = batch * (6 * rows.itemsize + 4 * last_tokens.itemsize)  # of a block table one number
        bench.add_small({"kernel": "compute_slot_mapping", "rows": batch}, [work], num_bytes)


def sampling(bench: Bench) -> None:
    """One token for each row of logits; the least is to read them once."""
    for kind, params in SAMPLING.items():
        for batch in bench.args.batch:
            logits = 3 * torch.randn(batch, bench.model.vocab_size, device=bench.device)
            table = SamplingTable(
                torch.full((batch,), params["temperature"], device=bench.device),
                torch.full((batch,), int(params.get("top_k", 0)), dtype=torch.int32, device=bench.device),
                torch.full((batch,), params.get("top_p", 1.0), device=bench.device),
                torch.zeros(batch, device=bench.device),
                torch.arange(batch, dtype=torch.int64, device=bench.device),
            )
            rows = torch.arange(batch, dtype=torch.int32, device=bench.device)
            positions = torch.full((batch,), 100, dtype=torch.int64, device=bench.device)
            work = partial(bench.kernels.choose_tokens, logits, table, rows, positions)
            bench.add({"kernel": f"choose_tokens: {kind}", "rows": batch}, work, logits.nbytes)
