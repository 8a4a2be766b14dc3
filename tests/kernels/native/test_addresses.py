"""Addresses of tensors: what C would read wrongly, or beyond, is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoengine.core.attention import AttentionSpec, Runs
from nanoengine.core.sampling import SamplingTable
from nanoengine.kernels.native.addresses import DTYPES, WrongTensor, address, rows
from nanoengine.kernels.native.attention import NativeAttention
from nanoengine.kernels.native.c_functions import recorded_calls, signatures
from nanoengine.kernels.native.operations import NativeKernels
from nanoengine.kernels.operations import ExpertBiases, Mixture, Norm
from nanoengine.kernels.recurrences import Decay, StateRuns, Stores
from tests.kernels.marks import needs_kernels

F32, BF16, I32, I64 = torch.float32, torch.bfloat16, torch.int32, torch.int64


def test_of_a_tensor_in_one_piece_it_is_the_first_numbers() -> None:
    assert address(None, F32) is None
    assert rows(None, F32, 3, 4) == (None, 0)
    tensor = torch.arange(12.0).view(3, 4)
    assert address(tensor, F32) == address(tensor, F32, 12) == tensor.data_ptr()
    assert address(tensor[1], F32, 4) == tensor.data_ptr() + 4 * tensor.itemsize
    assert rows(tensor[:, 1:3], F32, 3, 2) == (tensor.data_ptr() + 4, 4)
    assert rows(tensor.view(3, 1, 2, 2)[:, :, 1:], F32, 3, 1, 1, 2) == (tensor.data_ptr() + 8, 4)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 4)[:, ::2],
        torch.zeros(2, 4).T,
        torch.zeros(4, 2, dtype=F32, device="meta"),
        *(torch.zeros(4, 2, dtype=dtype) for dtype in (torch.float64, torch.float16, BF16, I32)),
        torch.zeros(4, 3),
        torch.zeros(3, 2),
    ],
)
def test_other_dtypes_devices_sizes_and_gaps_are_refused(tensor: Tensor) -> None:
    for read in (lambda: address(tensor, F32, 8), lambda: rows(tensor, F32, 4, 2)):
        with pytest.raises(WrongTensor, match=r"a tensor is torch\.\w+ \[.*\] with strides .* on (cpu|meta): a C func"):
            read()


def test_dtypes_without_a_number_are_refused() -> None:
    assert DTYPES[BF16] == 1
    with pytest.raises(WrongTensor, match=r"not torch\.float64"):
        DTYPES[torch.float64]


# ---- every call


def weight(kernels: NativeKernels, outputs: int, inputs: int) -> Any:
    made = kernels.new_weight(outputs, inputs, BF16, torch.device("cpu"))
    made.rows(0, outputs).copy_(torch.ones(outputs, inputs))
    return made


def experts(kernels: NativeKernels, outputs: int, inputs: int) -> Any:
    made = kernels.new_experts(4, outputs, inputs, BF16, torch.device("cpu"))
    for number in range(4):
        made.expert(number).copy_(torch.ones(outputs, inputs))
    return made


Call = Callable[..., object]


def calls() -> Iterator[tuple[str, Call, dict[str, Tensor]]]:
    """Everything that C is given a tensor for: its name, and a call of it with these."""
    k, a = NativeKernels(num_threads=1), NativeAttention(16)

    def ones(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.ones(shape, dtype=dtype)

    def ints(*values: int, dtype: torch.dtype = I32) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    w = weight(k, 128, 64)
    x, residual, norm, bias = ones(3, 64), ones(3, 64), ones(64, dtype=F32), ones(128)
    normed = {"x": x, "residual": residual, "norm": norm}
    yield "linear", lambda x, bias: k.linear(x, w, bias), {"x": x, "bias": bias}
    yield "logits", lambda x: k.logits(x, w), {"x": x}
    yield (
        "norm_linear",
        lambda x, residual, norm, bias: k.product(x, w, bias, norm=Norm(norm, 1e-6), residual=residual),
        {**normed, "bias": bias},
    )
    yield (
        "norm_gated_linear",
        lambda x, residual, norm: k.product(x, w, norm=Norm(norm, 1e-6), residual=residual, activation="silu"),
        normed,
    )
    yield "gate", lambda both: k.gate(both, "silu"), {"both": ones(3, 64)}
    yield "gated_linear", lambda x: k.product(x, w, activation="silu"), {"x": x}
    yield "add_rms_norm", lambda x, residual, norm: k.add_rms_norm(x, residual, norm, 1e-6), normed
    yield "embed", lambda ids: k.embed(ids, w), {"ids": ints(1, 2, 3, dtype=I64)}
    matrices = experts(k, 32, 64), experts(k, 32, 64), experts(k, 64, 32)
    biases = {"gate": ones(4, 32, dtype=F32), "up": ones(4, 32, dtype=F32), "down": ones(4, 64, dtype=F32)}
    yield (
        "experts",
        lambda x, chosen, factors, gate, up, down: k.experts(
            x, Mixture(*matrices, biases=ExpertBiases(gate, up, down)), chosen, factors
        ),
        {"x": x, "chosen": torch.tensor([[0, 1]] * 3), "factors": ones(3, 2, dtype=F32), **biases},
    )
    placed = {
        "token_ids": ints(5, 6, 7),
        "rows": ints(0, 1),
        "query_start_loc": ints(0, 1, 3),
        "num_computed": ints(4, 0),
        "last_tokens": ints(1, 2, 3, dtype=I64),
        "tables": torch.ones(1, 3, 2, dtype=I32),
    }
    yield "compute_slot_mapping", lambda **own: k.compute_slot_mapping(**own, block_size=16, max_query_len=2), placed
    yield (
        "choose_tokens",
        lambda logits, rows, last_tokens, **table: k.choose_tokens(
            logits, SamplingTable(**table), rows, torch.arange(3), last_tokens
        ),
        {
            "logits": ones(3, 40, dtype=F32),
            "rows": ints(0, 1, 2),
            "last_tokens": ints(1, 2, 3, dtype=I64),
            "temperature": ones(3, dtype=F32),
            "top_k": ints(0, 0, 0),
            "top_p": ones(3, dtype=F32),
            "min_p": torch.zeros(3),
            "seeds": ints(1, 2, 3, dtype=I64),
        },
    )
    yield (
        "draw_tokens",
        lambda logits, keys, temperature: k.draw_tokens(logits, keys, temperature),
        {"logits": ones(3, 40, dtype=F32), "keys": ints(1, 2, 3, dtype=I64), "temperature": ones(3, dtype=F32)},
    )
    yield "log_sum_exp", k.log_sum_exp, {"logits": ones(3, 40, dtype=F32)}
    runs = {
        "slots": ints(0, 1),
        "starts": ints(0, 1, 3),
        "store_starts": ints(0, 1, 2),
        "store_tokens": ints(0, 2),
        "store_slots": ints(0, 1),
    }

    def stored(
        slots: Tensor, starts: Tensor, store_starts: Tensor, store_tokens: Tensor, store_slots: Tensor
    ) -> StateRuns:
        return StateRuns(slots, starts, Stores(store_starts, store_tokens, store_slots))

    yield (
        "short_conv",
        lambda x, weight, bias, states, before, after, **own: k.short_conv(
            x, weight, bias, states, stored(**own), before=before, after=after
        ),
        {
            "x": x,
            "weight": ones(4, 64, dtype=F32),
            "bias": norm,
            "states": ones(2, 3, 64, dtype=F32),
            "before": ones(3, 64),
            "after": ones(3, 64),
            **runs,
        },
    )
    decay = {"log_rate": ones(4, dtype=F32), "decay_bias": ones(4, dtype=F32)}
    yield (
        "delta_rule",
        lambda qkv, a, b, log_rate, decay_bias, states, **own: k.delta_rule(
            qkv, a, b, Decay(log_rate, decay_bias), 2, states, stored(**own)
        ),
        {"qkv": ones(3, 96), "a": ones(3, 4), "b": ones(3, 4), **decay, "states": ones(2, 4, 8, 16, dtype=F32), **runs},
    )
    yield (
        "mamba2",
        lambda xbc, dt, log_rate, decay_bias, skip, states, **own: k.mamba2(
            xbc, dt, Decay(log_rate, decay_bias), skip, 2, states, stored(**own)
        ),
        {
            "xbc": ones(3, 96),
            "dt": ones(3, 4),
            **decay,
            "skip": ones(4, dtype=F32),
            "states": ones(2, 4, 8, 16, dtype=F32),
            **runs,
        },
    )
    yield (
        "gated_norm",
        lambda x, gate, weight: k.gated_norm(x, gate, weight, 1e-6, 32, gate_first=True),
        {"x": ones(3, 64, dtype=F32), "gate": ones(3, 64), "weight": norm},
    )
    yield "sigmoid_gate", k.sigmoid_gate, {"x": x, "gate": ones(3, 64)}
    caches = {name: torch.zeros(a.kv_shape(4, 2, 32), dtype=BF16) for name in ("k_cache", "v_cache")}
    angles = {name: ones(3, 1, 16, dtype=F32) for name in ("cos", "sin")}
    yield (
        "rotate_and_write",
        lambda qkv, q_norm, k_norm, cos, sin, slots, k_cache, v_cache: a.rotate_and_write(
            qkv, (q_norm, k_norm, 1e-6, cos, sin), (k_cache, v_cache), slots
        ),
        {
            "qkv": ones(3, 8 * 32),
            "q_norm": ones(32, dtype=F32),
            "k_norm": ones(32, dtype=F32),
            **angles,
            "slots": ints(16, 17, 18, dtype=I64),
            **caches,
        },
    )
    yield (
        "write_kv",
        lambda k, v, slots, k_cache, v_cache: a.write_kv(k, v, (k_cache, v_cache), slots),
        {"k": ones(3, 2, 32), "v": ones(3, 2, 32), "slots": ints(16, 17, 18, dtype=I64), **caches},
    )
    for name in ("decode", "prefill"):
        yield (
            name,
            lambda q, tables, starts, lens, sinks, k_cache, v_cache, name=name: getattr(a, name)(
                q, (k_cache, v_cache), Runs(starts, lens, tables, [1, 2], [1, 2]), AttentionSpec(1.0), sinks
            ),
            {
                "q": ones(3, 4, 32),
                "tables": torch.ones(2, 1, dtype=I32),
                "starts": ints(0, 1, 3),
                "lens": ints(1, 2),
                "sinks": ones(4, dtype=F32),
                **caches,
            },
        )


FREE = {
    *{(name, "logits", how) for name in ("choose_tokens", "draw_tokens", "log_sum_exp") for how in ("narrow", "short")},
    *{(name, "x", "short") for name in ("linear", "logits", "gated_linear")},
    *{("gate", "both", how) for how in (str(F32), "narrow", "short")},
    *{("embed", "ids", how) for how in ("narrow", "short")},
    *{("compute_slot_mapping", name, how) for name in ("token_ids", "tables") for how in ("narrow", "short")},
    *{(name, "states", "short") for name in ("short_conv", "delta_rule", "mamba2")},
    *{(name, *own) for name in ("decode", "prefill") for own in (("q", "short"), ("tables", "narrow"))},
    ("gated_norm", "gate", str(F32)),
}
"""What may be otherwise: another count of rows, another dtype of all that is computed, or what other numbers say."""


def spoiled(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    for dtype in (torch.float64, torch.float16, F32, BF16, I64, I32, torch.int16, torch.bool):
        if dtype is not tensor.dtype:
            yield str(dtype), tensor.to(dtype)
    yield "on no device", torch.empty_like(tensor, device="meta")
    yield "narrow", tensor[..., :-1]
    yield "short", tensor[:-1]


ELSEWHERE = {
    *("adapted_linear", "adapted_gated_linear"),  # what they are given has been through a product: tests/features/lora
    *("pack_blocks", "pack_groups", "unpack"),  # while weights are loaded: tests/kernels/native/test_weights.py
    *("gather", "lost_rank", "select_rows", "run_calls"),  # by ranks and recordings
    *("panel_width", "panels_size", "quantized_instruction", "uses_tiles", "set_num_threads"),  # of no tensor
}


@needs_kernels
def test_no_c_function_is_given_what_it_would_read_wrongly() -> None:
    """It is refused by `WrongTensor`, and not by an assertion, which Python may leave out."""
    called, count = set[str](), 0
    with recorded_calls(lambda name, _: called.add(name)):
        for name, call, tensors in calls():
            call(**tensors)
            for which, tensor in tensors.items():
                for how, other in spoiled(tensor):
                    if (name, which, how) in FREE:
                        continue
                    count += 1
                    try:
                        call(**tensors | {which: other})
                    except WrongTensor:
                        continue
                    pytest.fail(f"{name} took {which} {how}: {other.dtype} {list(other.shape)}")
    assert count > 800
    assert not signatures().keys() - called - ELSEWHERE, "these are called with no wrong tensor"


@needs_kernels
@pytest.mark.parametrize(
    ("name", "which", "place", "number"),
    [
        *(("embed", "ids", place, number) for place in range(3) for number in (-1, 128, 2**31, -(2**40), 2**62)),
        *(("compute_slot_mapping", "rows", place, number) for place in range(2) for number in (-1, 3, 2**31 - 1)),
        *(
            ("compute_slot_mapping", "num_computed", place, number)
            for place in range(2)
            for number in (-9, -1, 32, 2**31 - 1)
        ),
        *(
            ("compute_slot_mapping", "query_start_loc", place, number)
            for place in (1, 2)
            for number in (-1, 4, 2**31 - 1)
        ),
        *(("experts", "chosen", (place, 1), number) for place in range(3) for number in (-1, 4, 2**40)),
    ],
)
def test_numbers_that_lead_outside_of_a_tensor_are_refused(name: str, which: str, place: Any, number: int) -> None:
    """C takes them for ids of tokens, rows, positions and experts."""
    [(call, tensors)] = [(call, tensors) for own, call, tensors in calls() if own == name]
    call(**tensors)
    tensors[which][place] = number
    with pytest.raises(WrongTensor, match="none of"):
        call(**tensors)
