"""Requests of which some are constrained, each with what its text must look like."""

from __future__ import annotations

import json
import random
import re
from typing import Any

from nanoengine import SamplingParams

COUNTED = {"kind": {"enum": ["function", "class"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}}
TAG = {"structures": [{"begin": "def ", "schema": {"enum": ["f"]}, "end": "()"}], "triggers": ["def"]}
KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "json": (
        {"json": {"type": "object", "properties": COUNTED, "required": [*COUNTED], "additionalProperties": False}},
        lambda text: json.loads(text).keys() == {"kind", "count"},
    ),
    "choice": ({"choice": ["red", "reddish", "green"]}, lambda text: text in ("red", "reddish", "green")),
    "regex": ({"regex": "[0-9]{3,8}(-x)?"}, lambda text: re.fullmatch("[0-9]{3,8}(-x)?", text)),
    "grammar": ({"grammar": 'root ::= "(" ("a" | "b"){1,5} ")"'}, lambda text: re.fullmatch(r"\([ab]{1,5}\)", text)),
    "tag": (
        {"structural_tag": TAG},
        lambda text: all(rest.startswith(' "f"()') for rest in text.split("def")[1:]),
    ),
}
SHARED = "def binary_search(values, wanted):\n    first, last = 0, len(values)\n"


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
