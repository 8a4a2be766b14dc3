"""A constrained request says the same however it is run, and it is what was asked for; nobody else says anything else for it."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from typing import Any

import pytest

from nanoengine import LLM, SamplingParams
from nanoengine.core.config import POLICIES
from nanoengine.features.structured.structured import Structured
from tests.e2e.small_engine import assert_idle

KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "json": (
        {
            "json": {
                "type": "object",
                "properties": {
                    "kind": {"enum": ["function", "class"]},
                    "count": {"type": "integer", "minimum": 0, "maximum": 99},
                },
                "required": ["kind", "count"],
                "additionalProperties": False,
            }
        },
        lambda text: json.loads(text).keys() == {"kind", "count"},
    ),
    "choice": ({"choice": ["red", "reddish", "green"]}, lambda text: text in ("red", "reddish", "green")),
    "regex": ({"regex": "[0-9]{3,8}(-x)?"}, lambda text: re.fullmatch("[0-9]{3,8}(-x)?", text)),
    "grammar": ({"grammar": 'root ::= "(" ("a" | "b"){1,5} ")"'}, lambda text: re.fullmatch(r"\([ab]{1,5}\)", text)),
    "tag": (
        {
            "structural_tag": {
                "structures": [{"begin": "def ", "schema": {"enum": ["f"]}, "end": "()"}],
                "triggers": ["def"],
            }
        },
        lambda text: all(rest.startswith(' "f"()') for rest in text.split("def")[1:]),
    ),
}
SHARED = "def binary_search(values, wanted):\n    first, last = 0, len(values)\n"
OPTIONS: dict[str, Any] = {"max_model_len": 200, "use_tqdm": False, "device": "cpu"}


def draw_requests(rng: random.Random) -> list[tuple[str, SamplingParams, str | None]]:
    drawn: list[tuple[str, SamplingParams, str | None]] = []
    for number in range(8):
        kind = rng.choice([None, *KINDS])
        values: dict[str, Any] = {
            "seed": number,
            "n": rng.choice([1, 1, 2]),
            "temperature": rng.choice([0.0, 0.7, 1.5]),
        }
        values |= {"max_tokens": rng.choice([8, 60]), "ignore_eos": rng.random() < 0.2}
        values |= rng.choice(
            [{}, {"top_k": 5}, {"repetition_penalty": 1.3}, {"logit_bias": {17: -100.0}}, {"logprobs": 2}]
        )
        if kind is not None:
            values["structured_outputs"] = KINDS[kind][0]
        drawn.append((SHARED[: rng.choice([12, 40, 68])], SamplingParams(**values), kind))
    return drawn


def answers(llm: LLM, requests: list[tuple[str, SamplingParams, str | None]]) -> list[Any]:
    outputs = llm.generate([own[0] for own in requests], [own[1] for own in requests], use_tqdm=False)
    return [
        [(own.token_ids, own.text, own.finish_reason, own.logprobs) for own in output.outputs] for output in outputs
    ]


@pytest.mark.parametrize("seed", range(3))
def test_a_constrained_request_says_what_it_says_alone(seed: int) -> None:
    rng, seen = random.Random(seed), Counter[str]()
    requests = draw_requests(rng)
    with LLM("demo", num_kv_blocks=200, enable_prefix_caching=False, max_num_seqs=1, **OPTIONS) as llm:
        expected = [answers(llm, [request])[0] for request in requests]
    for (_, params, kind), said in zip(requests, expected, strict=True):
        for _, text, reason, _ in said:
            if kind is not None and reason == "stop":
                assert KINDS[kind][1](text), text
                seen[kind] += 1
            assert params.max_tokens is not None
    for _ in range(4):
        way = {
            "scheduling_policy": rng.choice(POLICIES),
            "async_scheduling": rng.random() < 0.5,
            "num_kv_blocks": rng.choice([13, 200]),
            "max_num_batched_tokens": rng.choice([16, 512]),
            "long_prefill_token_threshold": rng.choice([None, 5]),
            "speculation": rng.choice([None, "ngram"]),
            "enable_prefix_caching": rng.random() < 0.7,
        }
        with LLM("demo", **OPTIONS, **way) as llm:
            assert answers(llm, requests) == expected, way
            assert_idle(llm)
            [part] = (part for part in llm.engine.scheduler.parts if isinstance(part, Structured))
            assert not part.constraints
            assert not part._in_flight
            assert part.drafter not in llm.engine.scheduler.parts
            seen["preemptions"] += llm.engine.scheduler.num_preemptions
            seen["forced"] += 0 if part.drafter is None else part.drafter.num_accepted
    assert seen["forced"]
    assert len(seen) > 3
