"""Models whose layers remember differently, run in ways that are drawn: each request gets the tokens that it gets alone.

Alone means: by the same kernels, in a pool in which every group keeps all it ever had, one request and one step at a time.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanoengine import LLM, SamplingParams
from nanoengine.core.messages import NULL_BLOCK, StepPlan
from nanoengine.kv_groups.layouts import Need, WindowLayout, group_layers
from nanoengine.models import capability as models
from nanoengine.models.description import Description
from nanoengine.models.model_config import ModelConfig
from tests.e2e.late import late_device
from tests.e2e.small_engine import finish, open_llm, submit
from tests.e2e.test_every_way_of_running import MAX_LEN, NUM_REQUESTS, REQUESTS, draw_engine, run
from tests.models.families import family_checkpoint
from tests.support import fill_kv_with_nan, model_runner

THREE_GROUPS = "Llama with two windows and none"
SHAPES = (
    THREE_GROUPS,
    "Gemma3",
    "Mistral, a window",
    "Gemma2",
    THREE_GROUPS,
    "gpt-oss",
    "Mistral, a window of the token alone",
    "OLMo3, windows",
    "Qwen2, the first full",
    "SmolLM3, windows where nothing rotates",
)


def with_three_kinds(config: ModelConfig) -> ModelConfig:
    """Six layers: two see all, two a window that is smaller than a block of 16, two a longer one."""
    layer = config.layer(0)
    layers = (replace(layer, window=9), layer, replace(layer, window=14))
    return replace(config, layers=layers)


@contextmanager
def checkpoint(tmp_path: Path, shape: str, seed: int, **overrides: Any) -> Iterator[Path]:
    """A folder with a model of this shape; inside, its config is what the shape says."""
    if shape != THREE_GROUPS:
        yield family_checkpoint(tmp_path, shape, seed=seed, **overrides)
        return
    describe = models.describe

    def described(*where: Path) -> Description:
        found = describe(*where)
        return replace(found, config=with_three_kinds(found.config))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "describe", described)
        yield family_checkpoint(tmp_path, "Llama", seed=seed, num_hidden_layers=6, **overrides)


def least_blocks(folder: Path, options: dict[str, Any], max_len: int = MAX_LEN) -> int:
    """Blocks that one sequence of this length needs."""
    config = models.describe(folder, None).config.within(max_len)
    groups = group_layers([config.layer(number).window for number in range(config.num_layers)])
    most_new = min(options.get("long_prefill_token_threshold") or 8192, options["max_num_batched_tokens"])
    return Need(groups, options["block_size"], most_new, 1 + options.get("async_scheduling", False)).num_blocks(max_len)


def blocks_given_back(llm: LLM, patch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each group gives back blocks that its window has left, from now on."""
    runner, counts = model_runner(llm), Counter[int]()
    launch = runner.launch

    def watched(plan: StepPlan) -> Any:
        counts.update(entries.group for entries in plan.tables if NULL_BLOCK in entries.block_ids)
        return launch(plan)

    patch.setattr(runner, "launch", watched)
    return counts


@pytest.mark.parametrize("number", range(20))
def test_tokens_are_those_that_each_gets_alone(tmp_path: Path, number: int) -> None:
    shape = SHAPES[number % len(SHAPES)]
    options: dict[str, Any] = draw_engine(200 + number)
    chosen = random.Random(number).sample(range(NUM_REQUESTS), 8)
    requests = [REQUESTS[i] for i in chosen]
    with ExitStack() as stack:
        folder = stack.enter_context(checkpoint(tmp_path, shape, number))
        least = least_blocks(folder, options)
        options["num_kv_blocks"] = least + (2 if number // 2 % 2 else 12 * least)
        bare: dict[str, Any] = {"max_num_seqs": 1, "enable_prefix_caching": False, "async_scheduling": False}
        bare |= {name: options[name] for name in ("kernels", "kv_cache_dtype")}
        with open_llm(folder, max_model_len=MAX_LEN, num_kv_blocks=400, **bare) as llm:
            alone = [run(llm, [request])[0] for request in requests]
        if number % 3 == 2:
            stack.enter_context(late_device(can_record=number % 2 > 0, seed=number))
        if number % 7 == 3 and options.get("enable_prefix_caching", True):
            options["kv_disk_path"] = str(tmp_path / "kv")
        llm = stack.enter_context(open_llm(folder, max_model_len=MAX_LEN, **options))
        fill_kv_with_nan(llm)
        given_back = blocks_given_back(llm, stack.enter_context(pytest.MonkeyPatch.context()))
        assert run(llm, requests) == alone
        assert run(llm, requests[::-1]) == alone[::-1], "with what the first time has left in the cache"
        layouts = llm.engine.scheduler.blocks.layouts
        assert all(isinstance(layouts[group], WindowLayout) for group in given_back)
        assert given_back or options["block_size"] == 16


@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
@pytest.mark.parametrize("options", [{}, {"preemption_mode": "swap", "kv_host_memory": 1 << 20}], ids=["", "swap"])
def test_a_storm_ends_and_changes_nothing(tmp_path: Path, policy: str, options: dict[str, Any]) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=44, ignore_eos=True)
    asked = [([(7 * i + 11 * j) % 200 for j in range(8 + i)], greedy) for i in range(8)]
    options |= {"block_size": 4, "max_num_batched_tokens": 24, "scheduling_policy": policy, "max_model_len": MAX_LEN}
    with checkpoint(tmp_path, THREE_GROUPS, 7) as folder:
        with open_llm(folder, max_model_len=MAX_LEN, num_kv_blocks=400, max_num_seqs=1) as llm:
            alone = [run(llm, [request])[0] for request in asked]
        with open_llm(folder, num_kv_blocks=least_blocks(folder, options) + 3, **options) as llm:
            fill_kv_with_nan(llm)
            assert run(llm, asked) == alone
            metrics = llm.metrics
    assert metrics.num_preemptions > 2
    if "kv_host_memory" in options:
        assert metrics.offload.num_loaded_blocks > 0


def test_a_prefix_is_hit_behind_windows_whose_beginning_is_gone(tmp_path: Path) -> None:
    """Of a prompt of 48 tokens in blocks of 4 a window of 9 needs three blocks; the others' room was given to somebody else."""
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    prompt = [(7 * i + 3) % 200 for i in range(49)]
    with checkpoint(tmp_path, THREE_GROUPS, 5) as folder, open_llm(folder, num_kv_blocks=200, block_size=4) as llm:
        fill_kv_with_nan(llm)
        request, blocks = submit(llm, prompt, greedy), llm.engine.scheduler.blocks
        finish(llm)
        for group, layout in enumerate(blocks.layouts):
            for hash, _ in request.sequences[0].block_hashes[: layout.first_seen(48) // 4]:
                if hash in blocks.index[group]:
                    blocks._forget(blocks.index[group][hash])
        (again,) = llm.generate([prompt], greedy, use_tqdm=False)
        assert again.num_cached_tokens == 48
        assert again.outputs[0].token_ids == request.output().outputs[0].token_ids


def test_the_pool_of_a_long_sequence_is_as_small_as_arithmetic_says(tmp_path: Path) -> None:
    """60 tokens in blocks of 4, chunks of 6: 15 blocks where all is seen; a window of 9 needs 5 at a time, one of 14 6."""
    options: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 6, "max_num_seqs": 1, "max_model_len": 60}
    with checkpoint(tmp_path, THREE_GROUPS, 6) as folder:
        needed = least_blocks(folder, options, 60)
        assert needed == 15 + 5 + 6
        with open_llm(folder, num_kv_blocks=needed, **options) as llm:
            fill_kv_with_nan(llm)
            params = SamplingParams(temperature=0.0, ignore_eos=True)
            [output] = llm.generate([[(5 * i) % 200 for i in range(50)]], params, use_tqdm=False)
            assert len(output.outputs[0].token_ids) == 10
            assert llm.metrics.num_preemptions == 0
            tokens = output.outputs[0].token_ids
        with open_llm(folder, num_kv_blocks=300, max_model_len=60) as llm:
            [output] = llm.generate([[(5 * i) % 200 for i in range(50)]], params, use_tqdm=False)
            assert output.outputs[0].token_ids == tokens
