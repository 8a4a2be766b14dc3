"""K and V of 8 bits read as pairs of numbers: these are exact, and the rest is attention by its definition."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from nanoengine.kernels.triton.attention import paged_decode as module
from nanoengine.kernels.triton.attention.attend_range_int8 import SPLIT_PAIRS
from nanoengine.kernels.triton.attention.backend import TritonAttention
from nanoengine.kernels.triton.tuning import DEFAULTS
from tests.kernels.attention.contract import draw_length, draw_spec
from tests.kernels.attention.every_backend import DEVICE, TRITON, written_in_torch
from tests.kernels.attention.paged import Heads, Pool, Sequences, assert_attended
from tests.kernels.noting import noting

PAIRS = replace(DEFAULTS, int8_pair_tile=32, int8_programs_per_sm=1)


@pytest.fixture(autouse=True)
def everything_is_on_the_device() -> Iterator[None]:
    with DEVICE:
        yield


class NumbersPool(Pool):
    """Numbers are multiplied as they are: what is exact is not rounded to the dtype."""

    multiplies_numbers = True


# ---- the assembler


def words(numbers: np.ndarray) -> np.ndarray:
    """bfloat16 of two numbers in each word, as float32 [n, 2], the lower half first."""
    halves = np.stack((numbers & 0xFFFF, numbers >> 16), 1).astype(np.uint32)
    return (halves << 16).view(np.float32)


def emulate(code: str, given: np.ndarray) -> dict[str, np.ndarray]:
    """Registers after a few PTX instructions, each of them for many words side by side; `given` is $2."""
    registers = {"$2": given}

    def value(name: str) -> np.ndarray:
        return registers[name] if name in registers else np.full_like(given, int(name, 0))

    for line in re.findall(r"^\s*([a-z][\w.]*\s[^;]+);", code, re.MULTILINE):
        name, *operands = re.split(r"[\s,]+", line)
        target, *values = operands[0], *operands[1:]
        if name == "mov.b32":
            registers[target] = value(values[0])
        elif name == "shr.u32":
            registers[target] = value(values[0]) >> value(values[1])
        elif name == "lop3.b32":  # bit i of the last operand: for a = bit 2 of i, b = bit 1, c = bit 0
            a, b, c = map(value, values[:3])
            table = int(values[3], 0)
            parts = [
                (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i in range(8) if table >> i & 1
            ]
            registers[target] = np.bitwise_or.reduce(parts)
        else:
            assert name == "fma.rn.bf16x2", name
            a, b, c = (words(value(each)) for each in values)
            exact = (a * b + c).view(np.uint32)
            assert not (exact & 0xFFFF).any(), "it is rounded"
            registers[target] = exact[:, 0] >> 16 | exact[:, 1]
    return registers


def test_every_pair_of_bytes_becomes_its_numbers() -> None:
    """Both halves of a word, whatever is in the other one."""
    pairs = np.arange(1 << 16, dtype=np.uint32)
    registers = emulate(SPLIT_PAIRS.value, pairs | pairs[::-1] << 16)
    for half, own in enumerate((pairs, pairs[::-1])):
        expected = own.astype(np.uint16).view(np.int8).reshape(-1, 2)
        for register, numbers in (("$0", expected[:, 0]), ("$1", expected[:, 1])):
            assert (words(registers[register])[:, half] == numbers).all()


# ---- attention


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_any_decode_is_attention_by_its_definition(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of heads, lengths, windows, sinks and caps that are drawn, in shares that end anywhere."""
    rng = random.Random(dim)
    for _ in range(4):
        heads = Heads(rng.randint(1, 2), rng.choice([1, 2, 5, 8, 20]), dim)
        lens = [draw_length(rng, 200) for _ in range(rng.randint(1, 5))]
        starts = [n - 1 for n in lens]
        spec = draw_spec(rng, replace(TRITON, longest=150), dim)
        tuning = replace(PAIRS, int8_pair_tile=rng.choice([16, 32, 64]))
        shares = rng.choice([1, 3, 10, 40])
        monkeypatch.setattr(module, "num_multiprocessors", lambda *_, shares=shares: shares)
        backend = written_in_torch(TritonAttention(rng.choice([16, 64]), tuning))
        sequences = Sequences(heads, backend.block_size, lens, torch.bfloat16, seed=rng.randrange(1000))
        pool = NumbersPool(sequences, backend, norms=False, rotated=False, quantized=True, spec=spec)
        pool.fill(starts)
        assert_attended(pool.step(len(lens), starts, lens), pool.exact(starts, lens), TRITON.looser)


def launched(
    dim: int = 128, *, dtype: torch.dtype = torch.bfloat16, quantized: bool = True, **tuning: int
) -> tuple[bool, int, int]:
    """Whether pairs are read, the tile, and how many programs share a multiprocessor's registers."""
    backend = written_in_torch(TritonAttention(16, replace(DEFAULTS, **tuning)))
    pool = Pool(Sequences(Heads(1, 2, dim), 16, [5], dtype), backend, norms=False, rotated=False, quantized=quantized)
    with noting() as launches:
        pool.step(1, [4], [5])
    launch = launches[-1]
    registers = launch.options["maxnreg"] * 32 * launch.options["num_warps"]
    return launch.values["PAIRS"], launch.values["TILE"], min(4, (1 << 16) // registers)


def test_how_many_programs_share_a_multiprocessor_and_what_they_read() -> None:
    """Those of other queries and other heads have what they had before."""
    assert launched() == (False, 32, 2)
    assert launched(quantized=False) == (False, 32, 4)
    for count in (1, 3, 4):
        assert launched(int8_programs_per_sm=count) == (False, 32, max(count, 2)), "a thread has 255 registers at most"
        assert launched(int8_programs_per_sm=count, quantized=False) == (False, 32, 4)
    asked = {"int8_programs_per_sm": 4, "int8_pair_tile": 64}
    assert launched(**asked) == (True, 64, 4)
    assert launched(64, **asked) == (True, 64, 3)
    assert launched(256, **asked) == (True, 32, 3)
    assert launched(64, int8_programs_per_sm=4) == (False, 64, 2)
    assert (
        launched(48, **asked)[0]
        == launched(dtype=torch.float16, **asked)[0]
        == launched(quantized=False, **asked)[0]
        is False
    )
