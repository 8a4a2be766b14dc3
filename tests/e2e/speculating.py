"""Requests of every kind, engines that guess ahead, guessers who know the answers and err, and what must be the same at last."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from nanoengine import LLM, BeamSearchParams, RequestOutput, SamplingParams
from nanoengine.observability.metrics import EngineMetrics
from nanoengine.sampling.token_logprobs import TokenLogprobs
from nanoengine.speculation.step_costs import StepCosts
from tests.e2e.small_engine import VOCAB_SIZE, Broken, assert_idle, run_with_beams
from tests.e2e.test_every_way_of_running import SHARED, draw_engine
from tests.speculation.scripted import Say, Scripted

NUM_REQUESTS = 36
MAX_LEN = 72
FEW = [*range(64, 70)]  # "a" to "f"
BEAMS = BeamSearchParams(beam_width=3, max_tokens=6)

Asked = tuple[list[int], SamplingParams]

WISHES: dict[str, list[dict[str, Any]]] = {
    "temperature": [{"temperature": 0.0}, {"temperature": 0.0}, {"temperature": 0.3}, {"temperature": 1.0}, {"temperature": 2.0}],
    "filters": [{}, {}, {"top_k": 12}, {"top_p": 0.8}, {"min_p": 0.05, "top_k": 40}],
    "penalties": [
        {},
        {},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"frequency_penalty": -1.0, "repetition_penalty": 0.8},
    ],
    "bias": [{}, {"logit_bias": {7: 4.0, 30: -4.0, 90: 2.5}}, {"allowed_token_ids": FEW}, {"allowed_token_ids": FEW}],
    "bad words": [{}, {}, {"bad_words": ["a", "bc", "bbb", "fed"]}, {"bad_words": [chr(i) for i in range(48, 97)]}],
    "stop": [{}, {"stop": ["ba", "fed", "cc"]}, {"stop": ["G", "e"], "min_tokens": 4}, {"stop": ["ab", "dd", "f"]}],
    "end": [{"ignore_eos": True}, {}, {"stop_token_ids": list(range(0, 300, 5)), "min_tokens": 7}],
    "logprobs": [{}, {"logprobs": 0}, {"logprobs": 3}],
    "prompt logprobs": [{}, {}, {}, {"prompt_logprobs": 2}],
    "completions": [{}, {}, {}, {"n": 2}, {"n": 3}, {"n": 1, "best_of": 2}],
    "speculate": [{}, {}, {}, {}, {"speculate": False}],
}  # fmt: skip


def draw_request(i: int) -> Asked:
    rng = random.Random(i)
    prompt = SHARED[: rng.choice([0, 0, 15, 16, 21])] + [rng.randrange(256) for _ in range(rng.randint(1, 20))]
    wishes: dict[str, Any] = {"seed": i, "max_tokens": rng.randint(7, 26)}
    for choices in WISHES.values():
        wishes |= rng.choice(choices)
    return prompt, SamplingParams(**wishes)


REQUESTS = [draw_request(i) for i in range(NUM_REQUESTS)]


# ---- what is said


NEAR = {"auto": 1e-4, "int8": 1e-2}
"""Largest difference between log probabilities, by kv_cache_dtype: sums that are added in another order are rounded otherwise."""


def assert_same(found: RequestOutput, expected: RequestOutput, within: float = NEAR["auto"]) -> None:
    for own, other in zip(found.outputs, expected.outputs, strict=True):
        assert (own.token_ids, own.text) == (other.token_ids, other.text)
        assert (own.finish_reason, own.stop_reason, own.index) == (other.finish_reason, other.stop_reason, other.index)
        assert own.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=20 * within)
        assert_close(own.logprobs, other.logprobs, within)
    assert_close(found.prompt_logprobs, expected.prompt_logprobs, within)


def assert_close(
    found: Sequence[TokenLogprobs | None] | None, expected: Sequence[TokenLogprobs | None] | None, within: float
) -> None:
    """The same tokens; where values are the same to the bit, so are ranks, and nearly tied tokens may change theirs otherwise."""
    if found is None or expected is None:
        assert found is expected
        return
    for own, other in zip(found, expected, strict=True):
        if own is None or other is None:
            assert own is other
            continue
        assert own.keys() == other.keys()
        for token, entry in own.items():
            assert abs(entry.logprob - other[token].logprob) <= within
            assert within or entry.rank == other[token].rank


def run(llm: LLM, requests: Sequence[Asked], beams: Sequence[list[int]] = ()) -> list[RequestOutput]:
    """All of them at once, and beams for some prompts beside them."""
    made = [llm.engine.make_request(prompt, params) for prompt, params in requests]
    outputs = run_with_beams(llm, made, beams, BEAMS)
    assert_idle(llm)
    return outputs


# ---- who guesses


class Free(StepCosts):
    """Drafts cost nothing, whatever steps take: it is the same ones that are verified each time."""

    def record(self, num_tokens: int, seconds: float) -> None:
        pass


class Knowing:
    """Has read what is going to be said, and errs at some rate; where follows from the tokens alone."""

    def __init__(self, outputs: Sequence[RequestOutput], errors: float):
        self.errors = errors
        self.texts: dict[tuple[int, ...], list[int]] = {}
        for output in outputs:
            for completion in output.outputs:
                text = output.prompt_token_ids + completion.token_ids
                for end in range(len(output.prompt_token_ids), len(text)):
                    self.texts.setdefault(tuple(text[:end]), text)

    def __call__(self, token_ids: Sequence[int], most: int) -> list[int]:
        luck = random.Random(len(token_ids) * 1000 + sum(token_ids))
        text = self.texts.get(tuple(token_ids), [])[len(token_ids) :][:most]
        return [luck.randrange(VOCAB_SIZE) if luck.random() < self.errors else token for token in text]


def outside(say: Say) -> Say:
    return lambda tokens, most: [*say(tokens, most)[:3], VOCAB_SIZE, -1, 2**40]


def too_long(say: Say) -> Say:
    return lambda tokens, most: [*say(tokens, most), *range(50)]


def no_tokens(say: Say) -> Say:
    return lambda tokens, most: [*say(tokens, most)[: len(tokens) % 4], "seven", None, 1.5]  # type: ignore[list-item]


def raising(say: Say) -> Say:
    def guess(tokens: Sequence[int], most: int) -> Sequence[int]:
        if len(tokens) % 9 == 0:
            raise Broken("no idea")
        return say(tokens, most)

    return guess


HARM: list[Callable[[Say], Say]] = [outside, too_long, no_tokens, raising]
ERRORS = {"knows": 0.0, "errs": 0.1, "errs often": 0.5, "means harm": 0.05}
GUESSERS = ["ngram", "suffix", *ERRORS]


def teach(llm: LLM, guesser: str, outputs: Sequence[RequestOutput], number: int = 0) -> None:
    """Let an engine's speculation have this guesser."""
    speculation = llm.built.capabilities["speculation"].speculation
    assert speculation is not None
    speculation.costs = Free()
    if guesser in ERRORS:
        say: Say = Knowing(outputs, ERRORS[guesser])
        speculation.proposer = Scripted(HARM[number % len(HARM)](say) if guesser == "means harm" else say)


# ---- engines


def draw_speculating(i: int, guesser: str, folder: Path) -> dict[str, Any]:
    """Of four engines one after the other each policy has two, and so has a small pool; one swaps, another writes files."""
    options, rng = draw_engine(300 + i), random.Random(i)
    swaps = {"preemption_mode": "swap", "kv_host_memory": 1 << 20}
    tiers: list[dict[str, Any]] = [{}, {"enable_prefix_caching": False}, swaps, {"kv_disk_path": str(folder / str(i))}]
    block_size = 16 if i % 4 == 2 else options["block_size"]  # native attention wants 16
    small = {"num_kv_blocks": (80 if i % 4 > 1 else 800) // block_size, "block_size": block_size}
    sizes = {"max_num_batched_tokens": rng.choice([5, 16, 64, 8192]), "num_drafts": rng.randint(2, 15)}
    shared = ("scheduling_policy", "kernels", "kv_cache_dtype", "long_prefill_token_threshold")
    return {
        **{name: options[name] for name in shared},
        "async_scheduling": i % 4 > 0,
        "speculation": "ngram" if guesser == "ngram" else "suffix",
        "max_num_seqs": rng.choice([4, 6, 256]),
        **small,
        **sizes,
        **tiers[i % 4],
    }


def note(seen: Counter[str], metrics: EngineMetrics) -> None:
    if (stats := metrics.speculation) is not None:
        seen.update(
            drafts=stats.num_drafts,
            accepted=stats.num_accepted,
            rejected=stats.num_drafts - stats.num_accepted,
            postponed=stats.num_postponed,
        )
    if (offload := metrics.offload) is not None:
        seen.update(saved=offload.num_saved_blocks + offload.num_written_files)
    seen.update(preemptions=metrics.num_preemptions, hits=metrics.cache.num_hit_tokens)
