"""Snapshots of states: which are taken, where prefixes are found, and that a run always begins with the right state."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.sampling_params import CoreSamplingParams
from nanoengine.core.sequence import Request
from tests.core.lives import check_lives
from tests.core.toys import VOCAB, run
from tests.features.speculation.toys import Drafted

from .remembering import RememberingModel, check_slots, make_hybrid


class Remembered(Drafted):
    """Models with states: a run begins with the state of the tokens before it."""

    rare = (*Drafted.rare, "evicted", "resumed")
    rounds = 2

    def engine(self, way: dict[str, Any], failing: list[int]) -> LLMEngine:
        num_snapshots, model = self.rng.choice([0, 1, 3, 50]), RememberingModel(4, failing=failing)
        engine, self.snapshots = make_hybrid(model=model, num_snapshots=num_snapshots, parts=self.parts(), **way)
        return engine

    def after_round(self, engine: LLMEngine, requests: list[Request]) -> None:
        check_slots(self.snapshots)

    def after_life(self, engine: LLMEngine) -> None:
        super().after_life(engine)
        own = self.snapshots
        self.seen.update(resumed=own.num_restored, evicted=own.num_evicted)
        assert not any((own._branches, own._drafted, own._last_of_decode)), "nothing is kept of those that have ended"
        assert engine.reset_prefix_cache()
        assert not self.snapshots.index
        check_slots(self.snapshots)


@pytest.mark.parametrize("seed", range(4))
def test_every_way_of_scheduling_begins_every_run_with_the_right_state(seed: int) -> None:
    check_lives(Remembered(seed), 30)


@pytest.mark.parametrize(("shared", "own"), [(1600, 600), (1500, 700)])
@pytest.mark.parametrize("at_once", [True, False])
def test_requests_that_share_a_prefix_find_a_state_where_they_part(at_once: bool, shared: int, own: int) -> None:
    """The two workloads of vLLM's issue 45238, all at once, or one request after the other: 52 and 0 of 64 were hits there. One
    behind the other, the second request leaves the state for all later ones.
    """
    rng = random.Random(0)
    prefix = [rng.randrange(VOCAB) for _ in range(shared)]
    engine, snapshots = make_hybrid(num_blocks=4000, block_size=16, max_model_len=4096)
    prompts = [prefix + [rng.randrange(VOCAB) for _ in range(own)] for _ in range(65)]
    requests = [engine.make_request(prompt, CoreSamplingParams(max_tokens=1)) for prompt in prompts]
    for batch in [requests] if at_once else [[request] for request in requests]:
        run(engine, batch)
    border, num_first = shared // 16 * 16, 1 if at_once else 2
    assert [request.output().num_cached_tokens for request in requests] == [0] * num_first + [border] * (65 - num_first)
    assert at_once or snapshots.num_evicted > 0, "each prompt leaves one at its end that nobody asks for"


def test_a_conversation_goes_on_behind_its_last_full_block() -> None:
    engine, snapshots = make_hybrid(max_model_len=400)
    text = [1, 2, 3, 4, 5, 6]
    lengths, cached = [], []
    for _ in range(5):
        request = engine.make_request(text, CoreSamplingParams(max_tokens=23, ignore_eos=True))
        run(engine, [request])
        output = request.output()
        lengths.append(len(text))
        cached.append(output.num_cached_tokens)
        text = text + output.outputs[0].token_ids + [7, 8, 9]
    for (before, _), count in zip(pairwise(lengths), cached[1:], strict=True):
        assert count == (before + 21) // 4 * 4, "the last block that a decode has gone past"
    assert len(snapshots.index) <= 2 * len(lengths), "of each text one in its prompt, and one in its answer"


def test_completions_of_one_prompt_share_its_state() -> None:
    engine, snapshots = make_hybrid()
    request = engine.make_request(list(range(21)), CoreSamplingParams(n=5, max_tokens=3, temperature=1.0))
    run(engine, [request])
    assert snapshots.num_restored == 4
    assert isinstance(engine.executor, RememberingModel)
    assert engine.executor.num_computed < 21 + 4 * 1 + 5 * 3
