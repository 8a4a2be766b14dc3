"""Steps with drafts are replayed from recordings, filled up with padding, and say what unrecorded ones say."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from nanoengine import LLM, SamplingParams
from nanoengine.engine.kv.block_pool import NULL_BLOCK
from nanoengine.engine.speculation.step_costs import StepCosts
from nanoengine.runner import startup
from nanoengine.runner.graphs import RecordedSteps, drafted_bucket_for, drafted_sizes
from tests.e2e.small_engine import late_device
from tests.engine.speculation.guessers import Scripted
from tests.support import fill_kv_with_nan, model_runner

SIZES = [(1, 4), (2, 4)]
NEW = 6
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]
COMMON = {"kernels": "triton", "attention_backend": "triton", "num_kv_blocks": 40, "max_num_seqs": 3}
COMMON |= {"device": "cpu", "dtype": "float32", "max_model_len": 64, "use_tqdm": False}  # type: ignore[dict-item]


@pytest.fixture(scope="module")
def right(tiny: Path) -> list[list[int]]:
    """What follows each prompt."""
    with LLM(str(tiny), device="cpu", dtype="float32", num_kv_blocks=40, use_tqdm=False) as llm:
        return tokens(llm, len(PROMPTS))


@pytest.fixture(scope="module")
def recorded(tiny: Path) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch, late_device(can_record=True):
        patch.setattr(startup, "prompt_sizes", lambda *_: [])
        patch.setattr(startup, "bucket_sizes", lambda _: [1])
        patch.setattr(startup, "drafted_sizes", lambda *_: SIZES)
        with LLM(str(tiny), speculation="ngram", num_drafts=3, **COMMON) as llm:  # type: ignore[arg-type]
            yield llm


def tokens(llm: LLM, count: int) -> list[list[int]]:
    params = SamplingParams(temperature=0.8, seed=5, repetition_penalty=1.1, max_tokens=NEW, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS[:count], params, use_tqdm=False)]


@pytest.mark.parametrize(("count", "size"), [(1, (1, 4)), (2, (2, 4)), (3, None)])
def test_a_step_with_drafts_runs_in_the_smallest_recording_that_holds_it(
    recorded: LLM, right: list[list[int]], count: int, size: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, seen = model_runner(recorded).graphs, Counter[tuple[int, int]]()
    assert graphs is not None
    replay = RecordedSteps.replay

    def watched(steps: RecordedSteps[tuple[int, int]], bucket: tuple[int, int]) -> torch.Tensor:
        seen.update([bucket] * (steps is graphs.drafted))
        return replay(steps, bucket)

    monkeypatch.setattr(RecordedSteps, "replay", watched)
    recorded.reset_prefix_cache()
    fill_kv_with_nan(recorded)
    drafts = recorded.engine.scheduler.drafts
    assert drafts is not None
    texts = [prompt + new for prompt, new in zip(PROMPTS, right, strict=True)]

    def say(token_ids: Sequence[int], most: int) -> list[int]:
        """Right, but that each second guess ends in something else."""
        text = next(text for text in texts if text[: len(token_ids)] == list(token_ids))
        guess = text[len(token_ids) : len(token_ids) + most]
        return guess if len(token_ids) % 2 else [*guess[:1], 0]

    drafts.speculation.proposer = Scripted(say)
    drafts.speculation.costs = StepCosts()
    before = drafts.speculation.snapshot()
    assert tokens(recorded, count) == right[:count]
    after = drafts.speculation.snapshot()
    assert after.num_accepted > before.num_accepted
    assert after.num_drafts - before.num_drafts > after.num_accepted - before.num_accepted
    if size is None:
        assert not seen
    else:
        assert seen[size] > 0
    kv_cache = model_runner(recorded).kv_cache
    assert kv_cache is not None
    assert all(cache[NULL_BLOCK].isnan().all() for layer in kv_cache.layers for cache in layer), "of padding nothing"


def test_sizes_ascend_and_the_first_that_holds_a_step_is_chosen() -> None:
    sizes = drafted_sizes(100, 15)
    assert sizes[0] == (1, 4)
    assert sizes[-1] == (16, 16)
    assert [a * b for a, b in sizes] == sorted(a * b for a, b in sizes)
    assert drafted_bucket_for((1, 5), sizes) == (1, 8)
    assert drafted_bucket_for((3, 2), sizes) == (4, 4)
    assert drafted_bucket_for((17, 2), sizes) is None
    assert drafted_bucket_for((1, 17), sizes) is None
    assert drafted_sizes(2, 3) == [(1, 4), (2, 4)], "no longer ones than drafts make"
    assert drafted_sizes(0, 3) == []
