"""Drafts change nothing but the number of steps: an engine with any proposer says what an engine without says."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest

from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.sequence import Request
from nanoengine.features.sampling.params import SamplingParams as Params
from nanoengine.features.speculation.ngram import NgramProposer
from nanoengine.features.speculation.proposer import Proposer
from nanoengine.features.speculation.speculation import Speculation
from tests.core.lives import Plug, answers, check_lives
from tests.core.toys import VOCAB, ToyModel, make_engine, run
from tests.features.speculation.scripted import HARM, Say, Scripted
from tests.features.speculation.toys import Drafted


def knowing(requests: Seq[Request]) -> Say:
    """Says what was said behind these very tokens; completions of one prompt differ, and then it is wrong at first."""
    texts: dict[tuple[int, ...], list[int]] = {}
    for request in requests:
        for seq in request.sequences:
            for end in range(seq.num_prompt_tokens, len(seq.token_ids)):
                texts.setdefault(tuple(seq.token_ids[:end]), seq.token_ids)
    return lambda tokens, most: texts.get(tuple(tokens), [])[len(tokens) :][:most]


def make(proposer: Proposer, *, num_drafts: int = 4, **options: Any) -> tuple[LLMEngine, Speculation]:
    own = Speculation(proposer, num_drafts=num_drafts, vocab_size=VOCAB, step_tokens=1000)
    return make_engine(parts=[own], **options), own


def truth(*requests: tuple[list[int], Params]) -> tuple[Say, list[Any]]:
    """What an engine without drafts says."""
    engine = make_engine()
    made = [engine.make_request(*request) for request in requests]
    run(engine, made)
    return knowing(made), answers(made)


class Proposed(Plug):
    """The policy's own drafter, with a proposer."""

    def __init__(self, seed: int, who: str):
        super().__init__(seed)
        self.who = who
        self.rare = (*Plug.rare, *(["postponed"] if who != "silent" else []))
        self.rare += ("accepted",) if who not in ("silent", "wrong") else ()
        self.rare += ("rejected",) if who in ("ngram", "erring", "mostly wrong", "wrong") else ()

    def engine(self, way: dict[str, Any], failing: list[int]) -> LLMEngine:
        proposer = NgramProposer(1) if self.who == "ngram" else Scripted(HARM[self.who](knowing(self.plain)))
        num_drafts = self.rng.randint(1, 15)
        engine, self.own = make(proposer, num_drafts=num_drafts, model=ToyModel(4, failing), **way)
        return engine

    def after_life(self, engine: LLMEngine) -> None:
        own, stats = self.own, self.own.stats
        assert not own._states, "nothing is kept of sequences that have ended"
        assert not own._prompts
        assert stats.num_accepted == sum(stats.accepted_at)
        self.seen.update(accepted=stats.num_accepted, rejected=stats.num_drafts - stats.num_accepted)
        self.seen.update(postponed=stats.num_postponed)


@pytest.mark.parametrize("who", [*HARM, "ngram"])
def test_nothing_changes_but_the_number_of_steps(who: str) -> None:
    plug = Proposed(0, who)
    check_lives(plug, 14)
    assert who != "silent" or not plug.seen["postponed"]


@pytest.mark.parametrize("seed", range(3))
def test_any_drafter_changes_nothing(seed: int) -> None:
    check_lives(Drafted(seed), 21)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
def test_right_drafts_save_steps(policy: str, depth: int) -> None:
    requests = [
        ([1, 2, 3], Params(max_tokens=41, seed=5, ignore_eos=True)),
        ([4], Params(max_tokens=41, ignore_eos=True, seed=6)),
    ]
    say, expected = truth(*requests)
    counts = {}
    for name, own in (("none", HARM["silent"](say)), ("right", say)):
        engine, _ = make(Scripted(own), num_drafts=7, policy=policy, depth=depth)
        made = [engine.make_request(*request) for request in requests]
        run(engine, made)
        assert answers(made) == expected
        counts[name] = engine.executor.num_launched
    assert counts["none"] >= 41
    assert counts["right"] <= 41 / 8 + 4 + 3 * (depth - 1), "eight tokens a step"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_that_finds_no_room_does_not_end_speculation(depth: int) -> None:
    """Under the policy "mixed", drafts take what prompts leave of a step."""
    first, second = ([1, 2, 3], Params(max_tokens=40, ignore_eos=True)), ([5] * 40, Params(max_tokens=2))
    say, expected = truth(first, second)
    engine, own = make(Scripted(say), policy="mixed", num_blocks=16, depth=depth)
    made = [engine.make_request(*first), engine.make_request(*second)]
    run(engine, made)
    assert answers(made) == expected
    assert own.stats.num_accepted >= 28
    assert engine.executor.num_launched < 25


def test_drafts_end_where_the_sequence_must() -> None:
    """With all accepted, the last sample is the last token: none is computed in vain."""
    for max_tokens in range(1, 9):
        request = ([1, 2, 3, 4, 5], Params(max_tokens=max_tokens, ignore_eos=True, seed=1))
        say, expected = truth(request)
        engine, _ = make(Scripted(say), num_drafts=15)
        made = [engine.make_request(*request)]
        run(engine, made)
        assert answers(made) == expected
        assert engine.executor.num_computed <= 5 + max_tokens - 1
        assert engine.executor.num_launched <= (2 if max_tokens <= 6 else 3), "the first run has at most 4 drafts"


@pytest.mark.parametrize("num_blocks", [16, 14])
def test_nobody_is_preempted_for_drafts_and_they_use_the_slots_that_are_there(num_blocks: int) -> None:
    """Each needs 8 blocks for all its tokens, and begins with 7."""
    requests = [([seed] * 25, Params(max_tokens=7, ignore_eos=True, seed=seed)) for seed in (1, 2)]
    say, expected = truth(*requests)
    engine, own = make(Scripted(say), num_drafts=15, num_blocks=num_blocks)
    made = [engine.make_request(*request) for request in requests]
    for request in made:
        engine.submit(request)
    for _ in range(2):
        engine.step()
    assert engine.scheduler.num_preemptions == 0
    assert own.stats.num_accepted == (8 if num_blocks == 16 else 4), "4 drafts each, or 2 in the block that is there"
    run(engine, [])
    assert answers(made) == expected
    assert bool(engine.scheduler.num_preemptions) == (num_blocks == 14)


def test_blocks_of_a_rejected_draft_without_finite_logits_are_cleared_before_their_next_use() -> None:
    request = ([1, 2, 3, 4], Params(max_tokens=9, ignore_eos=True))
    say, expected = truth(request)
    odd = next(token for token in range(VOCAB) if token not in expected[0][0])
    model = ToyModel(4, broken=[(odd, position) for position in range(60)])

    def propose(tokens: Seq[int], most: int) -> list[int]:
        return [*say(tokens, 1), *[odd] * (most - 1)]

    engine, own = make(Scripted(propose), num_drafts=6, model=model)
    made = [engine.make_request(*request)]
    engine.submit(made[0])
    for _ in range(2):
        engine.step()
    [table], blocks = made[0].sequences[0].block_tables, engine.scheduler.blocks
    assert {block for block in table if blocks.contents[block] is None} <= blocks.dirty
    assert blocks.dirty
    run(engine, [])
    assert answers(made) == expected
    assert own.stats.num_drafts > own.stats.num_accepted > 0
    assert engine.scheduler.blocks.index[0], "what was sound can be found"
