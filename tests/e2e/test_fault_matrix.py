"""What goes wrong in a step ends the requests of that step, and nobody else ever notices.

The matrix: every point of a step where something may go wrong, while the victim's prompt is computed or while it is decoded; with
one step at a time, with two in flight, and with two on a device that is late; under each policy; with room for all, with
preemptions, with several completions, and behind a prefix that others have computed. One engine lives through all faults of its
kind.

After each fault: those who were in the step have ended with an error, all others have their tokens, every block is back, what is
cached still gives its log probabilities to the bit, and no prefix of the victim is found that may be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nanoengine import LLM, SamplingParams
from nanoengine.core.sequence import Request
from nanoengine.errors import NotFiniteLogits
from nanoengine.sampling.token_logprobs import TokenLogprobs
from tests.e2e.faults import POINTS, Saboteur
from tests.e2e.late import late_device
from tests.e2e.small_engine import POISON, Broken, assert_idle, finish, open_llm, step, submit, tokens_of
from tests.support import fill_kv_with_nan

DEPTHS = ("one step", "two steps", "two late steps")
POLICIES = ("prefill_first", "mixed")
SITUATIONS = ("plenty", "preempting", "completions", "shared prefix")


class World(NamedTuple):
    depth: str
    policy: str
    situation: str


WORLDS = [World(*parts) for parts in product(DEPTHS, POLICIES, SITUATIONS)]
FAULTS = [
    (point, moment)
    for point in POINTS
    for moment in ("prompt", "decode")
    if moment == "prompt" or not POINTS[point].starts
]

BLOCK = 4
SHARED = [(5 * i + 3) % 200 for i in range(4 * BLOCK)]
PROMPTS = [[(37 * i + 11 * j + 1) % 200 for j in range(7 + 3 * i)] for i in range(5)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=1, max_tokens=7, ignore_eos=True, repetition_penalty=1.3, logprobs=2),
    SamplingParams(temperature=0.9, seed=2, top_k=30, max_tokens=5, bad_words=["a", "b c"], presence_penalty=0.5),
    SamplingParams(temperature=0.0, max_tokens=6, min_tokens=5, logit_bias={7: 3.0, 9: -5.0}, frequency_penalty=0.4),
    SamplingParams(temperature=1.0, seed=4, top_p=0.9, max_tokens=4, allowed_token_ids=range(150), ignore_eos=True),
]
VICTIM = SamplingParams(temperature=0.7, seed=9, max_tokens=5, ignore_eos=True, logprobs=1)
WITNESS = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=20)
Logprobs = list[TokenLogprobs]


@dataclass
class Place:
    """An engine that lives through many faults."""

    world: World
    llm: LLM
    right: list[list[list[int]]]  # what the innocents get, completion by completion
    said: list[Logprobs] | None = None  # by the witnesses, before anything went wrong
    num_cached: list[int] = field(default_factory=list)  # tokens of each of them, the last time
    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    @property
    def prompts(self) -> list[list[int]]:
        return prompts_of(self.world.situation)

    @property
    def witnesses(self) -> list[int]:
        """Innocents whose prompts fit into the pool together."""
        return [4] if self.world.situation == "preempting" else [1, 4]

    def victim(self) -> list[int]:
        """A prompt that nobody has ever seen."""
        number = next(self.numbers)
        start = SHARED if self.world.situation == "shared prefix" else []
        return [*start, number % 200, number // 200, POISON, *((13 * number + i) % 200 for i in range(11))]

    def witness(self) -> list[Logprobs]:
        """What the engine says behind the prompts of some innocents."""
        outputs = self.llm.generate([self.prompts[i] for i in self.witnesses], WITNESS, use_tqdm=False)
        assert_idle(self.llm)
        self.num_cached = [output.num_cached_tokens for output in outputs]
        return [output.outputs[0].logprobs or [] for output in outputs]

    def call_witnesses(self) -> None:
        """First the innocents' prompts are computed, if they are not cached; then they are all found."""
        if self.said is None or self.world.situation == "preempting":
            self.witness()
        found = self.witness()
        assert self.num_cached == [len(self.prompts[i]) // BLOCK * BLOCK for i in self.witnesses]
        if self.said is None:
            self.said = found
        assert found == self.said, "log probabilities are as they were before any fault, to the bit"

    def run(self, send: Callable[[], Request]) -> list[Request]:
        """Three innocents, then the victim beside one more, then the last; the victim's request comes last."""
        innocents = []
        params = params_of(self.world.situation)
        for i in range(5):
            if i == 3:
                victim = send()
            innocents.append(submit(self.llm, self.prompts[i], params[i]))
            if i >= 2:
                step(self.llm, 2)
        finish(self.llm)
        return [*innocents, victim]


def prompts_of(situation: str) -> list[list[int]]:
    return [SHARED + prompt for prompt in PROMPTS] if situation == "shared prefix" else PROMPTS


def params_of(situation: str) -> list[SamplingParams]:
    return [replace(own, n=1 + i % 2) for i, own in enumerate(PARAMS)] if situation == "completions" else PARAMS


@pytest.fixture(scope="module")
def alone(tiny: Path) -> dict[str, list[list[list[int]]]]:
    """What each innocent gets with an engine to itself."""
    with open_llm(tiny, enable_prefix_caching=False, max_num_seqs=1, kernels="torch") as llm:
        return {
            situation: [
                [completion.token_ids for completion in output.outputs]
                for output in llm.generate(prompts_of(situation), params_of(situation), use_tqdm=False)
            ]
            for situation in SITUATIONS
        }


@pytest.fixture(scope="module", params=WORLDS, ids=" - ".join)
def place(tiny: Path, request: pytest.FixtureRequest, alone: dict[str, list[list[list[int]]]]) -> Iterator[Place]:
    world: World = request.param
    options: dict[str, Any] = {
        "block_size": BLOCK,
        "num_kv_blocks": 6 if world.situation == "preempting" else 150,
        "max_num_batched_tokens": 10 if world.situation == "completions" else 8192,
        "max_num_seqs": 5 if world.situation == "completions" else 4,
        "max_model_len": 24 if world.situation == "preempting" else 48,
        "kernels": "torch" if world.depth == "two late steps" else "auto",
        "scheduling_policy": world.policy,
        "async_scheduling": world.depth != "one step",
    }
    with ExitStack() as stack:
        if world.depth == "two late steps":
            stack.enter_context(late_device(can_record=True))
        llm = stack.enter_context(open_llm(tiny, **options))
        fill_kv_with_nan(llm)
        place = Place(world, llm, alone[world.situation])
        place.call_witnesses()
        yield place


def test_the_matrix_is_of_this_size() -> None:
    assert (len(POINTS), len(DEPTHS), len(POLICIES), len(SITUATIONS)) == (11, 3, 2, 4)
    assert len(WORLDS) * len(FAULTS) == 24 * 21 == 504


@pytest.mark.parametrize(("point", "moment"), FAULTS)
def test_a_fault_in_a_step(place: Place, point: str, moment: str) -> None:
    llm, situation = place.llm, place.world.situation
    is_nan = point == "NaN"
    prompt = place.victim()
    params = replace(VICTIM, n=3) if situation == "completions" else VICTIM
    saboteur = Saboteur(llm, POINTS[point], moment == "decode", is_nan)
    preemptions = llm.engine.scheduler.num_preemptions
    with pytest.MonkeyPatch.context() as patch:
        saboteur.lie_in_wait(patch)
        requests = place.run(lambda: submit(llm, prompt, params))
    victim = requests[-1]
    assert saboteur.has_struck
    if situation == "preempting":
        assert llm.engine.scheduler.num_preemptions > preemptions

    # Whoever was in that step ends with an error, nobody else does.
    for request, right in zip(requests, [*place.right, None], strict=True):
        is_touched = any(seq in saboteur.touched for seq in request.sequences)
        assert is_touched or request is not victim
        if is_touched:
            assert isinstance(request.error, NotFiniteLogits if is_nan else POINTS[point].error)
        else:
            assert request.error is None
        for i, seq in enumerate(request.sequences):
            assert (seq.finish_reason == "error") == (seq in saboteur.touched)
            if right is not None:
                assert seq.output_token_ids == right[i][: len(seq.output_token_ids)]
                assert seq.finish_reason == "error" or len(seq.output_token_ids) == len(right[i])

    if is_nan and situation == "shared prefix":  # nobody is served that either, until it is computed again
        place.witness()
    place.call_witnesses()

    # What may be wrong, is not found.
    (again,) = llm.generate([prompt], replace(params, max_tokens=2), use_tqdm=False)
    shared = len(SHARED) if situation == "shared prefix" else 0
    if all(seq.finish_reason == "error" for seq in victim.sequences):
        assert again.num_cached_tokens <= max(0 if is_nan else saboteur.num_sound, shared)
    for found, had in zip(again.outputs, tokens_of(victim), strict=True):
        assert found.token_ids[: len(had)] == had[:2]


def test_a_tokenizer_that_raises_hurts_the_one_whose_text_it_was(place: Place) -> None:
    llm = place.llm
    decode, calls = llm.tokenizer.decode, count(1)

    def failing(token_ids: Any, **how: Any) -> str:
        if next(calls) > 3:
            raise Broken("no text")
        return decode(token_ids, **how)

    prompt = place.victim()

    def send() -> Request:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llm.tokenizer, "decode", failing)
            return submit(llm, prompt, VICTIM)

    *innocents, victim = place.run(send)
    assert isinstance(victim.error, Broken)
    assert victim.output().outputs[0].finish_reason == "error"
    assert all(request.error is None for request in innocents)
    assert [tokens_of(request) for request in innocents] == place.right
    place.call_witnesses()


def test_a_listener_that_raises_hurts_nobody(place: Place) -> None:
    llm = place.llm

    def listener(event: object) -> None:
        raise Broken(str(event))

    errors = llm.metrics.num_listener_errors
    llm.listen_to_kv_events(listener)
    prompt = place.victim()
    requests = place.run(lambda: submit(llm, prompt, VICTIM))
    llm.listen_to_kv_events(None)
    assert llm.metrics.num_listener_errors > errors
    assert all(request.error is None for request in requests)
    assert [tokens_of(request) for request in requests[:-1]] == place.right
    place.call_witnesses()
