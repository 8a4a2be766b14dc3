"""Ranks that share a model have some rows of each B: requests with adapters get the bits of one device."""

from __future__ import annotations

import os
import random
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoengine import LLM, LoRARequest, SamplingParams
from nanoengine.core.config import POLICIES
from nanoengine.features.lora.products import _rows_of
from tests.features.lora.test_adapters import (
    GREEDY,
    SHARED,
    guess_with_harm,
    make,
    one_by_one,
    opened,
    own_adapters,
    said,
    tokens,
)
from tests.features.lora.written import write_adapter
from tests.kernels.marks import needs_kernels
from tests.models.families import SHAPES, WITH_STATES, family_checkpoint
from tests.scale.parallel.groups import let_group_compute, open_group
from tests.scale.parallel.test_parallel import ranks_of
from tests.support import threads

FEW_HEADS = {"mamba_n_heads": 4}
FAMILIES = ["SmolLM2's shape", "Phi3, half rotated", "Qwen3-MoE", "Granite, biases", "OLMo2", "gpt-oss"]


SEEDS = (8, 19, 23, 29, 47, 50, 52)
"""Of the first 60, all of which pass: other families, that take little time."""


def write_adapters(folder: Path, shapes: Any, rng: random.Random, count: int = 3) -> list[LoRARequest]:
    """Of all linear layers, and of some."""
    found = []
    for number in range(count):
        layers = {name: own for name, own in shapes.items() if number == 0 or rng.random() < 0.6}
        path = write_adapter(
            folder / str(number), layers, number, targets=".*", r=rng.choice([1, 4, 9]),
            dtype=rng.choice([torch.float32, torch.bfloat16]),
        )  # fmt: skip
        found.append(LoRARequest(f"adapter {number}", number + 1, str(path)))
    return found


def shape_of(seed: int) -> str:
    names = WITH_STATES if seed % 2 else FAMILIES
    return names[seed // 2 % len(names)]


@needs_kernels
@pytest.mark.parametrize("seed", SEEDS)
def test_what_ranks_say_with_adapters_has_the_bits_of_one_device(tmp_path: Path, seed: int) -> None:
    rng, shape = random.Random(seed), shape_of(seed)
    sizes: dict[str, Any] = {"head_dim": rng.choice([32, 64])} | (FEW_HEADS if shape.startswith("Granite 4") else {})
    folder = family_checkpoint(tmp_path / "model", shape, seed=seed, **sizes)
    options: dict[str, Any] = {"kernels": "native", "enforce_eager": True, "num_threads": 1, "max_loras": 3}
    options |= {"dtype": rng.choice(["float32", "bfloat16"]), "quantization": rng.choice([None, "int8", "int4"])}
    with threads(1), opened(folder, enable_prefix_caching=False, num_kv_blocks=200, **options) as llm:
        adapters = write_adapters(tmp_path / "adapters", own_adapters(llm).shapes, rng)
        asked: list[Any] = []
        for own in rng.sample([None, *adapters, *adapters, None], 6):
            prompt = SHARED[: rng.choice([0, 16, 50])] + [rng.randrange(250) for _ in range(rng.randint(1, 30))]
            params = SamplingParams(
                temperature=rng.choice([0.0, 1.0]), seed=len(asked), max_tokens=rng.randint(3, 12), logprobs=1,
                n=1, ignore_eos=True,
            )  # fmt: skip
            asked.append((prompt, params, own))
        alone = one_by_one(llm, asked)
        right = [said(request.output()) for request in alone]
    way = {
        "scheduling_policy": rng.choice(POLICIES),
        "async_scheduling": rng.random() < 0.5,
        "max_num_batched_tokens": rng.choice([16, 64]),
        "max_num_seqs": rng.choice([3, 256]),
        "speculation": rng.choice([None, "ngram"]),
        "num_kv_blocks": 90,
    }
    heads = SHAPES[shape][1].get("num_attention_heads", 4)
    size = rng.randint(2, min(4, heads))
    with threads(1), ExitStack() as stack:
        given = {"max_model_len": 256, "enable_lora": True, **options, **way}
        llm = let_group_compute(stack.enter_context(open_group(size, folder, **given)))
        if way["speculation"]:
            guess_with_harm(llm, alone, rng)
        for _ in range(2):  # the second finds what the first has left in the cache
            order = rng.sample(range(len(asked)), len(asked))
            made = [make(llm, *asked[i]) for i in order]
            for request in made:
                llm.engine.submit(request)
            while llm.engine.has_unfinished:
                llm.engine.step()
            assert [said(own.output()) for own in made] == [right[i] for i in order], (shape, size, way, options)


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_b_are_those_of_the_ranks_outputs(seed: int) -> None:
    """Some outputs of a matrix have an adapter, and some are here."""
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(60), 2 * rng.randint(1, 4)))
    kept = [range(start, stop) for start, stop in zip(cuts[::2], cuts[1::2], strict=True)]
    first, count = rng.randrange(60), rng.randint(1, 30)
    b = torch.arange(first, first + count)[:, None]  # each row is the output that it is of
    at, rows = _rows_of(first, b, kept)
    here = [row for own in kept for row in own]
    assert rows.flatten().tolist() == [row for row in here if first <= row < first + count]
    assert here[at : at + len(rows)] == rows.flatten().tolist()


def test_ranks_in_processes_have_adapters_again_after_a_loss(tmp_path: Path) -> None:
    """Also where the folder that one was read from is gone, and where it was there from the start."""
    folder = family_checkpoint(tmp_path / "model", "Qwen3-Next", head_dim=32)
    options = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 50, "max_model_len": 256, "enable_lora": True}
    with LLM(str(folder), use_tqdm=False, **options) as llm:
        adapters = write_adapters(tmp_path / "adapters", own_adapters(llm).shapes, random.Random(1), 2)
        prompts, each = [SHARED[:50]] * 3, [None, *adapters]
        expected = tokens(llm.generate(prompts, GREEDY, lora_request=each, use_tqdm=False))
        assert len(set(map(tuple, expected))) == 3
    modules = [f"{own.lora_name}={own.lora_path}" for own in adapters]
    options |= {"tensor_parallel_size": 2, "lora_modules": modules}
    with LLM(str(folder), use_tqdm=False, **options) as llm:
        shutil.rmtree(tmp_path / "adapters")
        each = [None, *(LoRARequest(own.lora_name) for own in adapters)]
        for _ in range(2):
            assert tokens(llm.generate(prompts, GREEDY, lora_request=each, use_tqdm=False)) == expected
            os.kill(ranks_of(llm)[1], signal.SIGKILL)
        own_adapters(llm).unload("adapter 0")
        llm.engine.step()
        each[2] = each[0]
        assert tokens(llm.generate(prompts[::2], GREEDY, lora_request=each[::2], use_tqdm=False)) == expected[:1] * 2
