"""Ranks that share a model have some rows of each B. All requests get the bits of one device: tests/scale/parallel."""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch

from nanoengine import LLM, LoRARequest
from nanoengine.features.lora.adapted_products import _rows_of
from tests.e2e.drawn_requests import write_adapters
from tests.features.lora.test_adapters import GREEDY, SHARED, tokens
from tests.models.families import family_checkpoint
from tests.scale.parallel.test_parallel import ranks_of


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
        adapters = write_adapters(llm, tmp_path / "adapters", random.Random(1), 2)
        prompts, each = [SHARED[:50]] * 3, [None, *adapters]
        expected = tokens(llm.generate(prompts, GREEDY, lora_request=each, use_tqdm=False))
        assert len(set(map(tuple, expected))) == 3
    modules = [f"{own.lora_name}={own.lora_path}" for own in adapters]
    options |= {"tensor_parallel_size": 2, "lora_modules": modules}
    with LLM(str(folder), use_tqdm=False, **options) as llm:
        shutil.rmtree(tmp_path / "adapters")
        each = [None, *(LoRARequest(own.lora_name) for own in adapters)]
        assert tokens(llm.generate(prompts, GREEDY, lora_request=each, use_tqdm=False)) == expected
        os.kill(ranks_of(llm)[1], signal.SIGKILL)
        assert tokens(llm.generate(prompts, GREEDY, lora_request=each, use_tqdm=False)) == expected
