"""The whole engine with drafts, on models with tensors: the tokens of an engine without, whoever guesses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from nanoengine.builder import details
from nanoengine.core.config import EngineConfig
from nanoengine.core.errors import InvalidConfig
from nanoengine.core.llm import CoreLLM
from nanoengine.core.sampling_params import CoreSamplingParams
from nanoengine.core.startup import Startup
from nanoengine.features.speculation.capability import SpeculativeDecoding
from nanoengine.features.speculation.options import SpeculationOptions
from nanoengine.features.speculation.speculation import Speculation
from tests.support import tiny_checkpoint

PROMPTS = [[(7 * i + 3 * j) % 250 for j in range(20 + 9 * i)] for i in range(4)]
PARAMS = [
    CoreSamplingParams(temperature=0.9, top_k=40, seed=4, max_tokens=24, ignore_eos=True),
    CoreSamplingParams(temperature=0.0, max_tokens=30),
    CoreSamplingParams(temperature=1.0, top_p=0.9, n=3, seed=2, max_tokens=20, ignore_eos=True),
    CoreSamplingParams(temperature=0.7, seed=9, max_tokens=24, stop_token_ids=range(0, 250, 9)),
]
WAYS: list[dict[str, Any]] = [
    {},
    {"async_scheduling": True},
    {"scheduling_policy": "mixed", "max_num_batched_tokens": 24},
    {"num_kv_blocks": 22, "block_size": 8, "async_scheduling": True, "scheduling_policy": "mixed"},
]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another shape and other weights, for drafts."""
    folder = tmp_path_factory.mktemp("small")
    shape = {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 270,
    }
    return tiny_checkpoint(folder, seed=1, **shape)


@contextmanager
def opened(model: Path, **options: Any) -> Iterator[tuple[CoreLLM, Speculation]]:
    """An engine whose steps have room for all drafts. K/V that nothing was written to is NaN."""
    common = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 60, "max_model_len": 128}
    llm, capability = CoreLLM.__new__(CoreLLM), SpeculativeDecoding()
    llm.config = EngineConfig.from_options(str(model), common | options, (SpeculationOptions,))
    llm.engine = Startup(llm.config, [capability]).build()
    for place in llm.engine.executor.kv_cache.pool_layers:
        for tensor in place:
            tensor.fill_(float("nan"))
    own = capability.speculation
    if own is not None:
        own.step_tokens = 1000
    with llm:
        yield llm, own


def run(llm: CoreLLM, prompts: list[list[int]] = PROMPTS, params: Any = PARAMS) -> list[Any]:
    given = params if isinstance(params, list) else [params] * len(prompts)
    outputs = llm.run([llm.engine.make_request(*pair) for pair in zip(prompts, given, strict=True)])
    return [[(own.token_ids, own.text, own.finish_reason) for own in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def right(tiny: Path) -> list[Any]:
    with opened(tiny) as (llm, own):
        assert own is None
        return run(llm)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_draft_model_that_is_the_model_itself_is_always_right(
    tiny: Path, right: list[Any], way: dict[str, Any]
) -> None:
    """Wherever its K/V has come from: computed, found, or computed again after preemption."""
    with opened(tiny, speculation=f"model:{tiny}", num_drafts=5, **way) as (llm, own):
        assert run(llm) == right
        assert run(llm) == right, "with prefixes that are found"
        assert llm.generate(PROMPTS[3:], PARAMS[1])[0].num_cached_tokens > 0
        stats = own.stats
        assert stats.num_drafts == stats.num_accepted > 0


def test_one_of_another_mind_changes_no_token(small: Path, tiny: Path, right: list[Any]) -> None:
    """It may know fewer tokens: vocabularies of one family are filled up to different sizes."""
    with opened(tiny, speculation=f"model:{small}", num_drafts=5) as (llm, own):
        assert run(llm) == right
        assert 0 < own.stats.num_accepted < own.stats.num_drafts / 2


def test_blocks_hold_the_kv_of_both(small: Path, tiny: Path) -> None:
    """They are sized for both, and what is done with a block is done with both."""
    memory = 1 << 20
    with opened(tiny, num_kv_blocks=None, kv_cache_memory=memory, max_num_seqs=256, max_model_len=64) as (llm, _):
        alone = llm.engine.executor.kv_cache.pool_layers
    with opened(tiny, speculation=f"model:{small}", num_kv_blocks=None, kv_cache_memory=memory, max_model_len=64) as (
        llm,
        _,
    ):
        places, num_blocks = llm.engine.executor.kv_cache.pool_layers, llm.engine.scheduler.blocks.num_blocks
        assert len(places) == len(alone) + 1
        block_bytes = sum(tensor[0].nbytes for place in places for tensor in place)
        assert num_blocks == memory // block_bytes - 1, "the null block takes memory, too"
        llm.engine.executor.kv_cache.zero([3])
        assert not any(tensor[3].any() for place in places for tensor in place)


def test_what_start_up_tells_of_speculation(tiny: Path) -> None:
    capability = SpeculativeDecoding()
    options = {"dtype": "float32", "device": "cpu", "num_kv_blocks": 40, "max_model_len": 64}
    config = EngineConfig.from_options(str(tiny), {"speculation": f"model:{tiny}"} | options, (SpeculationOptions,))
    startup = Startup(config, [capability])
    engine = startup.build()
    own = capability.speculation
    assert own is not None
    assert own.step_tokens == 32
    assert "speculation: model:" in details(startup)
    assert startup.most_drafts == 15
    assert startup.runs_eagerly
    assert startup.metric_sources["speculation"]() == own.stats
    engine.close()


def test_a_model_that_cannot_guess_is_named(tiny: Path, tmp_path: Path) -> None:
    short = tiny_checkpoint(tmp_path / "short", max_position_embeddings=64)
    with (
        pytest.raises(InvalidConfig, match=r"at most 64 positions, and max_model_len is 128: lower it"),
        opened(tiny, speculation=f"model:{short}"),
    ):
        pass
    other = tiny_checkpoint(tmp_path / "other")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(other)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(other)
    with (
        pytest.raises(InvalidConfig, match=r"has other tokens than the model's: choose a model of the same family"),
        opened(tiny, speculation=f"model:{other}"),
    ):
        pass
