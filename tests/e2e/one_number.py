"""One number: a token and its log probability follow from weights, prompt, parameters and seed alone, to the bit.

A model, requests and ways to run them are drawn: any family, dtype and quantization; parameters of every kind; and of an engine
its policy, chunks, blocks, pool, tiers, drafts, overlap and threads. Right is what each request gets alone, its prompt computed
whole, by one thread, without cache. The native kernels promise that; others only nearly.

python -m tests.e2e.one_number FIRST COUNT draws so many and counts what has happened.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from benchmarks import block_encoder, determinism
from nanoengine import LLM, BeamSearchParams, RequestOutput, SamplingParams
from nanoengine.attention.native import NativeAttention
from nanoengine.models import capability as models
from nanoengine.quantization.at_load import quantizer
from nanoengine.quantization.tensor import QuantizedTensor
from nanoengine.sampling.token_logprobs import TokenLogprobs
from tests.e2e.late import late_device
from tests.e2e.small_engine import assert_idle, run_with_beams
from tests.e2e.speculating import GUESSERS, WISHES, Asked, note, teach
from tests.e2e.test_windows_every_way import THREE_GROUPS, checkpoint, least_blocks
from tests.models.families import SHAPES
from tests.support import backend_of, fill_kv_with_nan, threads

MAX_LEN = 700
SHARED = [(3 * i + 1) % 200 for i in range(530)]
BEGINNINGS = [0, 0, 0, 16, 33, 250, 272, 530]
"""How many tokens prompts have in common: around blocks, and around the parts of 256 into which attention cuts sequences."""


@dataclass(frozen=True)
class Model:
    """What is computed: a shape, and how its numbers are kept."""

    shape: str
    overrides: dict[str, Any]
    seed: int
    options: dict[str, Any]  # of the engine
    q4_k: bool


WITHOUT = ("Phi3, partial, long factors", "Phi3, partial, short factors")
"""Shapes whose factors fit one size of a head alone, which native attention does not compute."""


def draw_model(rng: random.Random) -> Model:
    """Heads that native attention computes, and rows that blocks of every format fill."""
    shape = rng.choice([*(shape for shape in SHAPES if shape not in WITHOUT), *[THREE_GROUPS] * 3])
    own = {} if shape == THREE_GROUPS else SHAPES[shape][1]
    overrides: dict[str, Any] = {"head_dim": rng.choice([32, 64]), "max_position_embeddings": MAX_LEN}
    if own.get("sliding_window"):
        overrides["sliding_window"] = rng.choice([1, 13, 40, 200, 300])
    q4_k = rng.random() < 0.2 and 256 % own.get("num_attention_heads", 4) == 0
    if q4_k:  # blocks of 256
        overrides |= {"hidden_size": 256, "intermediate_size": 256}
    options = {
        "dtype": rng.choice(["float32", "bfloat16", "bfloat16"]),
        "kv_cache_dtype": rng.choice(["auto", "auto", "int8"]),
        "quantization": "int8" if q4_k else rng.choice([None, None, "int8", "int4", "int4-128"]),
        "activation_dtype": rng.choice(["auto", "auto", "float32"]),
    }
    return Model(shape, overrides, rng.randrange(1000), options, q4_k)


def draw_request(rng: random.Random) -> Asked:
    prompt = SHARED[: rng.choice(BEGINNINGS)]
    prompt += [rng.randrange(256) for _ in range(rng.randint(1, rng.choice([10, 40, 120])))]
    wishes: dict[str, Any] = {"seed": rng.randrange(100), "max_tokens": rng.randint(7, 24)}
    looks_back = rng.random() < 0.6
    for name, choices in WISHES.items():
        if looks_back or name in ("temperature", "filters", "bias", "prompt logprobs", "speculate"):
            wishes |= rng.choice(choices)
    return prompt, SamplingParams(**wishes | {"logprobs": rng.choice([0, 2])})


def draw_way(rng: random.Random, folder: Path) -> dict[str, Any]:
    """Options of an engine, but for its pool; chunks and batches that are small even for these models."""
    return determinism.draw_way(rng, folder) | {
        "max_num_batched_tokens": rng.choice([7, 64, 300, 8192]),
        "max_num_seqs": rng.choice([4, 6, 256]),
        "block_size": rng.choice([16, 16, 32, 48, 128]),
        "num_drafts": rng.randint(2, 15),
    }


# ---- what is said


def said(output: RequestOutput) -> list[Any]:
    """All of it, floats too."""
    return [
        output.prompt_token_ids,
        entries(output.prompt_logprobs),
        *(
            (own.index, own.token_ids, own.text, own.finish_reason, own.stop_reason, own.cumulative_logprob, logprobs)
            for own in output.outputs
            for logprobs in [entries(own.logprobs)]
        ),
    ]


def entries(logprobs: Sequence[TokenLogprobs | None] | None) -> Any:
    return None if logprobs is None else [None if entry is None else dict(sorted(entry.items())) for entry in logprobs]


def run(
    llm: LLM, requests: Sequence[Asked], beams: Sequence[list[int]], rng: random.Random | None = None
) -> list[list[Any]]:
    """All at once; with an rng as those of two clients, some before others."""
    places = [{} if rng is None else {"priority": rng.choice([0, 0, -1]), "client": rng.choice("ab")} for _ in requests]
    made = [
        llm.engine.make_request(prompt, params, **place)
        for (prompt, params), place in zip(requests, places, strict=True)
    ]
    outputs = run_with_beams(llm, made, beams, BeamSearchParams(beam_width=3, max_tokens=5))
    assert_idle(llm)
    return [said(output) for output in outputs]


# ---- one draw


def in_q4_k(values: Tensor) -> QuantizedTensor:
    """Rows that no blocks fill have 8 bits."""
    return block_encoder.encode(values, "Q4_K") if values.shape[1] % 32 == 0 else quantizer("int8")(values)


@contextmanager
def opened(model: Model, folder: Path, **options: Any) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        if model.q4_k:
            patch.setattr(models, "quantizer", lambda *_: in_q4_k)
        options = {"max_model_len": MAX_LEN, "device": "cpu", **model.options, **options}
        with LLM(str(folder), use_tqdm=False, **options) as llm:
            assert isinstance(backend_of(llm), NativeAttention)
            fill_kv_with_nan(llm)
            yield llm


def check_one_number(seed: int, folder: Path, num_ways: int = 2) -> Counter[str]:
    """Draw a model and requests, and run them in some ways; returns what happened."""
    rng, seen = random.Random(seed), Counter[str]()
    model = draw_model(rng)
    requests = [draw_request(rng) for _ in range(8)]
    beams = [prompt for prompt, _ in requests[:1] if rng.random() < 0.3]
    alone: dict[str, Any] = {"max_num_seqs": 3, "enable_prefix_caching": False, "async_scheduling": False}
    with ExitStack() as stack:
        path = stack.enter_context(checkpoint(folder, model.shape, model.seed, **model.overrides))
        with threads(1), opened(model, path, num_kv_blocks=800, enforce_eager=True, num_threads=1, **alone) as llm:
            right = [run(llm, [request], [])[0] for request in requests]
            right += [run(llm, [], [prompt])[0] for prompt in beams]
            check_sent_again(llm, requests, right[: len(requests)], seen)
        for way in range(num_ways):
            where = folder / f"way {way}"
            where.mkdir()
            with ExitStack() as inner:
                run_in_a_way(model, path, requests, beams, right, rng, where, inner, seen, is_crowded=way % 2 == 0)
    seen["cases"] += 1
    return seen


def run_in_a_way(
    model: Model, path: Path, requests: list[Asked], beams: list[list[int]], right: list[Any], rng: random.Random,
    folder: Path, stack: ExitStack, seen: Counter[str], *, is_crowded: bool,
) -> None:  # fmt: skip
    options = draw_way(rng, folder)
    least = least_blocks(path, options, MAX_LEN)
    options["num_kv_blocks"] = least + 3 if is_crowded and not beams else 12 * least  # beams ask for room for all
    count = rng.choice([1, 2])
    stack.enter_context(threads(count))
    late = rng.random() < 0.3
    device = stack.enter_context(late_device(can_record=False, seed=rng.randrange(99))) if late else None
    llm = stack.enter_context(opened(model, path, num_threads=count, **options))
    if options["speculation"]:
        outputs = [completion for found in right[: len(requests)] for completion in found[2:]]
        texts = [(found[0], own[1]) for found in right[: len(requests)] for own in found[2:]]
        assert len(outputs) == len(texts)
        teach(llm, rng.choice(GUESSERS), [read(prompt, tokens) for prompt, tokens in texts], rng.randrange(4))
    for turn in range(2):  # the second time with what the first has left in the cache
        order = rng.sample(range(len(requests)), len(requests))
        found = run(llm, [requests[i] for i in order], beams, rng)
        for place, i in enumerate([*order, *range(len(requests), len(right))]):
            assert found[place] == right[i], (model, options, turn, i)
    if rng.random() < 0.5:
        check_sent_again(llm, requests, right[: len(requests)], seen)
    check_resumed(llm, requests, right[: len(requests)], rng, seen)
    note(seen, llm.metrics)
    seen.update(
        tokens=2 * sum(len(own[1]) for found in right for own in found[2:]),
        several=2 * sum(len(found) > 3 for found in right),
        overlapping=device.num_overlapping if device else 0,
        ways=1,
    )


def read(prompt: list[int], tokens: list[int]) -> RequestOutput:
    """What a guesser needs to have read."""
    completion = type("Read", (), {"token_ids": tokens})
    return type("Read", (), {"prompt_token_ids": prompt, "outputs": [completion]})  # type: ignore[return-value]


def check_sent_again(llm: LLM, requests: list[Asked], right: list[Any], seen: Counter[str]) -> None:
    """A generated token is as likely as the same token in a prompt, when the whole text is sent."""
    texts = [(found[0] + own[1], len(found[0]), own[6]) for found in right for own in found[2:]]
    asking = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    again = run(llm, [(text, asking) for text, _, _ in texts], [])
    for (text, first, logprobs), found in zip(texts, again, strict=True):
        for position in range(first, len(text)):
            token = text[position]
            assert found[1][position][token] == logprobs[position - first][token], (position, len(requests))
            seen["sent again"] += 1


def check_resumed(llm: LLM, requests: list[Asked], right: list[Any], rng: random.Random, seen: Counter[str]) -> None:
    """A text that is broken off goes on elsewhere as it would have: with what is known of it as the prompt, and its seed."""
    resumed, expected = [], []
    for (prompt, params), found in zip(requests, right, strict=True):
        tokens, cut = found[2][1], rng.randint(1, max(1, len(found[2][1]) - 1))
        if cut >= len(tokens) or looks_back(params):
            continue
        rest = replace(params, max_tokens=params.max_tokens - cut, prompt_logprobs=None)
        resumed.append((prompt + tokens[:cut], rest))
        expected.append((tokens[cut:], found[2][6][cut:]))
    for found, (tokens, logprobs) in zip(run(llm, resumed, []), expected, strict=True):
        assert (found[2][1], found[2][6]) == (tokens, logprobs)
        seen["resumed"] += 1


def looks_back(params: SamplingParams) -> bool:
    """Whether it matters which of the tokens so far are the prompt's."""
    plain = SamplingParams()
    names = (
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "min_tokens",
        "bad_words",
        "stop",
        "n",
        "best_of",
    )
    return any(getattr(params, name) != getattr(plain, name) for name in names)


def main(first: int, count: int) -> None:
    seen = Counter[str]()
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory() as folder:
            seen += check_one_number(seed, Path(folder))
        if seed % 10 == 9:
            print(seed, dict(seen), flush=True)
    print(dict(seen))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
