"""A draft model: its guesses are right where it agrees with the large model, wherever its K/V has come from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from nanoengine import LLM, SamplingParams
from nanoengine.engine.speculation.speculation import SpeculationStats
from nanoengine.engine.speculation.step_costs import StepCosts
from nanoengine.errors import InvalidConfig
from nanoengine.runner.model_runner import ModelRunner
from tests.support import fill_kv_with_nan, tiny_checkpoint

PROMPTS = [[(7 * i + 3 * j) % 250 for j in range(20 + 9 * i)] for i in range(4)]
SAMPLED = SamplingParams(temperature=0.9, top_k=40, seed=4, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another shape, and of another mind."""
    folder = tmp_path_factory.mktemp("small")
    return tiny_checkpoint(
        folder, seed=1, num_hidden_layers=1, hidden_size=32, num_attention_heads=2, num_key_value_heads=1
    )


@pytest.fixture(scope="module")
def right(tiny: Path) -> list[Any]:
    with LLM(str(tiny), device="cpu", dtype="float32", num_kv_blocks=40, max_model_len=128, use_tqdm=False) as llm:
        return run(llm)


@contextmanager
def guessed_by(draft: Path, model: Path, **options: Any) -> Iterator[tuple[LLM, SpeculationStats]]:
    """An engine that takes guesses for free, and its counters."""
    common = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 40, "max_model_len": 128, "use_tqdm": False}
    with LLM(str(model), speculation=f"model:{draft}", num_drafts=5, **common | options) as llm:
        drafts = llm.engine.scheduler.drafts
        assert drafts is not None
        drafts.speculation.costs, drafts.speculation.guess_share = StepCosts(), 0.0
        runner = llm.engine.executor
        assert isinstance(runner, ModelRunner)
        assert runner.draft_model is not None
        fill_kv_with_nan(llm)
        runner.draft_model.kv_cache.fill(float("nan"))
        yield llm, drafts.speculation.stats


def run(llm: LLM, params: SamplingParams = SAMPLED, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[(own.token_ids, own.text, own.finish_reason) for own in output.outputs] for output in outputs]


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_one_that_is_the_model_itself_is_always_right(tiny: Path, right: list[Any], kernels: str) -> None:
    with guessed_by(tiny, tiny, kernels=kernels) as (llm, stats):
        assert run(llm) == right
        assert stats.num_drafts == stats.num_accepted >= 3 * 24 * len(PROMPTS) // 5
        assert llm.metrics.steps.num_decode_steps <= 24 // 6 + 3


def test_one_of_another_mind_changes_no_token(small: Path, tiny: Path, right: list[Any]) -> None:
    with guessed_by(small, tiny) as (llm, stats):
        assert run(llm) == right
        assert 0 < stats.num_accepted < stats.num_drafts / 2


def test_a_prefix_that_was_found_is_one_for_both(tiny: Path) -> None:
    with guessed_by(tiny, tiny) as (llm, stats):
        first = run(llm)
        assert run(llm) == first
        assert llm.cache_stats.num_hit_tokens > 0
        assert stats.num_drafts == stats.num_accepted > 0


@pytest.mark.parametrize("options", [{"preemption_mode": "swap"}, {"preemption_mode": "recompute"}])
def test_who_was_preempted_comes_back_with_both(tiny: Path, right: list[Any], options: dict[str, Any]) -> None:
    with guessed_by(tiny, tiny, num_kv_blocks=11, **options) as (llm, stats):
        assert run(llm) == right
        assert llm.metrics.num_preemptions > 0
        assert (llm.metrics.num_swaps > 0) == (options["preemption_mode"] == "swap")
        assert stats.num_drafts == stats.num_accepted > 0


def test_files_hold_both(tiny: Path, small: Path, right: list[Any], tmp_path: Path) -> None:
    for _ in range(2):
        with guessed_by(tiny, tiny, kv_disk_path=str(tmp_path)) as (llm, stats):
            assert run(llm) == right
            assert stats.num_drafts == stats.num_accepted > 0
            num_read = llm.cache_stats.num_read_files
    assert num_read > 0
    with guessed_by(small, tiny, kv_disk_path=str(tmp_path)) as (llm, _):
        assert run(llm) == right
        assert llm.cache_stats.num_read_files == 0, "another draft model's files are foreign"


def test_forks_copy_both(tiny: Path) -> None:
    params = SamplingParams(temperature=1.0, seed=2, n=3, max_tokens=20, ignore_eos=True)
    with LLM(str(tiny), device="cpu", dtype="float32", num_kv_blocks=60, max_model_len=128, use_tqdm=False) as llm:
        expected = run(llm, params)
    with guessed_by(tiny, tiny, num_kv_blocks=60) as (llm, stats):
        assert run(llm, params) == expected
        assert llm.cache_stats.num_copied_blocks > 0
        assert stats.num_drafts == stats.num_accepted > 0


def test_it_may_know_fewer_tokens(tiny: Path, right: list[Any], tmp_path: Path) -> None:
    """Vocabularies of one family are filled up to different sizes."""
    draft = tiny_checkpoint(tmp_path, seed=0, vocab_size=270)
    with guessed_by(draft, tiny) as (llm, stats):
        assert run(llm) == right
        assert stats.num_drafts > 0


def test_its_blocks_are_as_large_as_both(small: Path, tiny: Path) -> None:
    with LLM(str(tiny), device="cpu", dtype="float32", num_kv_blocks=40, use_tqdm=False) as llm:
        alone = llm.engine.executor.info.block_bytes
    with guessed_by(small, tiny) as (llm, _):
        runner = llm.engine.executor
        assert isinstance(runner, ModelRunner)
        assert runner.draft_model is not None
        tensors = [tensor for place in runner.draft_model.kv_cache.places for tensor in place]
        assert (
            runner.info.block_bytes == alone + sum(tensor[0].nbytes for tensor in tensors) == runner.mover.block_bytes
        )


def test_mistakes_are_told(tiny: Path, tmp_path: Path) -> None:
    short = tiny_checkpoint(tmp_path / "short", max_position_embeddings=64)
    with pytest.raises(InvalidConfig, match=r"at most 64 positions, and max_model_len is 128: lower it"):
        LLM(str(tiny), speculation=f"model:{short}", max_model_len=128, num_kv_blocks=40, use_tqdm=False)
    other = tiny_checkpoint(tmp_path / "other")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(other)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(other)
    with pytest.raises(
        InvalidConfig, match=r"whose tokenizer has other tokens than the model's: choose a model of the"
    ):
        LLM(str(tiny), speculation=f"model:{other}", num_kv_blocks=40, use_tqdm=False)
