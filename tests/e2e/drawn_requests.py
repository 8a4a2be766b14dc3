"""Requests that are drawn for `one_number.py`, and when two answers are the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from nanoengine import LLM, BeamSearchParams, LoRARequest, PoolingParams, RequestOutput, SamplingParams
from nanoengine.core.sequence import Request
from nanoengine.features.beam_search.search import beam_search
from nanoengine.features.lora.adapters import adapters_of
from nanoengine.features.pooling.pooler import EMBEDDING
from nanoengine.features.sampling.token_logprobs import TokenLogprobs
from tests.e2e.drawn_models import Model
from tests.e2e.small_engine import finish
from tests.features.lora.written import write_adapter

SHARED = [(3 * i + 1) % 200 for i in range(530)]
BEGINNINGS = [0, 0, 0, 16, 33, 250, 272, 530]
"""How many tokens prompts have in common: around blocks, and around the parts of 256 into which attention cuts sequences."""
BEAMS = BeamSearchParams(beam_width=3, max_tokens=5)
FEW = [*range(64, 70)]  # "a" to "f"


class Asked(NamedTuple):
    prompt: list[int]
    params: Any  # SamplingParams or PoolingParams
    adapter: LoRARequest | None = None


WISHES: dict[str, list[dict[str, Any]]] = {
    "temperature": [{"temperature": 0.0}, {"temperature": 0.0}, {"temperature": 0.3}, {"temperature": 1.0}, {"temperature": 2.0}],
    "filters": [{}, {}, {"top_k": 12}, {"top_p": 0.8}, {"min_p": 0.05, "top_k": 40}],
    "bias": [{}, {"logit_bias": {7: 4.0, 30: -4.0, 90: 2.5}}, {"allowed_token_ids": FEW}, {"allowed_token_ids": FEW}],
    "prompt logprobs": [{}, {}, {}, {"prompt_logprobs": 2}],
    "speculate": [{}, {}, {}, {}, {"speculate": False}],
}  # fmt: skip
LOOKING_BACK: dict[str, list[dict[str, Any]]] = {
    "penalties": [
        {},
        {},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"frequency_penalty": -1.0, "repetition_penalty": 0.8},
    ],
    "stop": [{}, {"stop": ["ba", "fed", "cc"]}, {"stop": ["G", "e"], "min_tokens": 4}, {"stop": ["ab", "dd", "f"]}],
    "end": [{"ignore_eos": True}, {}, {"stop_token_ids": list(range(0, 300, 5)), "min_tokens": 7}],
    "completions": [{}, {}, {}, {"n": 2}, {"n": 3}, {"n": 1, "best_of": 2}],
    "grammar": [{}, {}, {}, {"structured_outputs": {"regex": "[a-f]{9}(bad|[a-f]{30})"}}],
}
"""Of some it matters which of the tokens so far are the prompt's."""


def draw_request(rng: random.Random, model: Model) -> Asked:
    prompt = SHARED[: rng.choice(BEGINNINGS if model.is_exact else BEGINNINGS[:5])]
    prompt += [rng.randrange(256) for _ in range(rng.randint(1, rng.choice([10, 40, 120])))]
    asked: dict[str, Any] = {"seed": rng.randrange(100), "max_tokens": rng.randint(7, 24)}
    wishes = WISHES | (LOOKING_BACK if rng.random() < 0.6 else {})
    for choices in wishes.values():
        asked |= rng.choice(choices)
    return Asked(prompt, SamplingParams(**asked | {"logprobs": rng.choice([0, 2])}))


def draw_embedding(rng: random.Random) -> Asked:
    prompt = SHARED[: rng.choice(BEGINNINGS[:5])] + [rng.randrange(256) for _ in range(rng.randint(1, 40))]
    wish = {"pooling": rng.choice(["last", "mean"]), "normalize": rng.random() < 0.5}
    return Asked(prompt, PoolingParams(**wish, dimensions=rng.choice([None, 9])))


def write_adapters(llm: LLM, folder: Path, rng: random.Random, count: int = 3) -> list[LoRARequest]:
    """Adapters of all linear layers of a model, and of some of them."""
    found = []
    for number in range(count):
        shapes = adapters_of(llm.engine.scheduler.parts).shapes
        layers = {name: shape for name, shape in shapes.items() if number == 0 or rng.random() < 0.6}
        rank, dtype = rng.choice([1, 4, 9]), rng.choice([torch.float32, torch.bfloat16, torch.float16])
        path = write_adapter(folder / str(number), layers, number, targets=".*", r=rank, dtype=dtype)
        found.append(LoRARequest(f"adapter {number}", number + 1, str(path)))
    return found


def looks_back(params: SamplingParams) -> bool:
    plain, names = SamplingParams(), {name for own in LOOKING_BACK.values() for wish in own for name in wish}
    return any(getattr(params, name) != getattr(plain, name) for name in names - {"ignore_eos", "stop_token_ids"})


def make_requests(llm: LLM, requests: Sequence[Asked], rng: random.Random | None = None) -> list[Request]:
    """With an rng they are those of two clients, some before others."""
    made = []
    for prompt, params, adapter in requests:
        place = {} if rng is None else {"priority": rng.choice([0, 0, -1]), "client": rng.choice("ab")}
        made.append(llm.engine.make_request(prompt, params, **place))
        if adapter is not None:
            adapters_of(llm.engine.scheduler.parts).use_for_requests(made[-1:], adapter)
    return made


def run(llm: LLM, made: Sequence[Request], beams: Sequence[list[int]] = ()) -> list[RequestOutput]:
    """All requests at once, and beam searches for some prompts beside them."""
    for request in made:
        llm.engine.submit(request)
    searched = beam_search(llm.engine, beams, BEAMS, SamplingParams) if beams else []
    finish(llm)
    assert [request.error for request in made] == [None] * len(made)
    return [*(request.output() for request in made), *searched]


def embeddings_of(llm: LLM, requests: Sequence[Asked]) -> list[np.ndarray[Any, Any]]:
    run(llm, made := make_requests(llm, requests))
    return [request.sequences[0].state[EMBEDDING] for request in made]


def assert_same(found: RequestOutput, right: RequestOutput, within: float) -> None:
    for own, other in zip(found.outputs, right.outputs, strict=True):
        assert (own.token_ids, own.text, own.index) == (other.token_ids, other.text, other.index)
        assert (own.finish_reason, own.stop_reason) == (other.finish_reason, other.stop_reason)
        assert is_close(own.cumulative_logprob, other.cumulative_logprob, 20 * within)
        assert_close(own.logprobs, other.logprobs, within)
    assert_close(found.prompt_logprobs, right.prompt_logprobs, within)


Entries = Sequence[TokenLogprobs | None] | None


def assert_close(found: Entries, right: Entries, within: float) -> None:
    """The same tokens; where values are the same to the bit, so are ranks, and nearly tied tokens may change theirs otherwise."""
    assert (found is None) == (right is None)
    for own, other in zip(found or (), right or (), strict=True):
        assert (own or {}).keys() == (other or {}).keys()
        for token, entry in (own or {}).items():
            assert other is not None
            assert is_close(entry.logprob, other[token].logprob, within)
            assert within or entry.rank == other[token].rank


def is_close(own: float | None, other: float | None, within: float) -> bool:
    return own == other or (own is not None and other is not None and abs(own - other) <= within)
