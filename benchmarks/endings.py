"""Ends: how many answers of a real model end by themselves under a grammar, beside free answers to the same prompts: greedy, of
192 tokens at most. What does not end is shown.

    python -m benchmarks.endings MODEL ...
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from nanoengine import LLM, SamplingParams
from nanoengine.core.outputs import CompletionOutput
from nanoengine.errors import InvalidPrompt

MAX_TOKENS = 192


def table(**properties: Any) -> dict[str, Any]:
    """The schema of an object."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
PERSON = table(name=TEXT, age=NUMBER, hobbies={"type": "array", "items": TEXT})
REVIEW = table(product=TEXT, score={"type": "number"}, is_good={"type": "boolean"})
PLACE, SUM = table(city=TEXT), table(a=NUMBER, b=NUMBER)
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "The weather of a city.", "parameters": PLACE}},
    {"type": "function", "function": {"name": "add", "description": "The sum of two numbers.", "parameters": SUM}},
    {"type": "function", "function": {"name": "now", "description": "The time of day."}},
]
NAMES, PLACES = ("Anna", "Tom", "Maria", "an old sailor"), ("Rome", "Oslo", "Lima and Cairo", "New York")
ASKED: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "schema": [
        *((f"Describe {own} as JSON with name, age and hobbies.", {"json": PERSON}) for own in NAMES),
        *(
            (f"Review a {own}: JSON with product, score from 0 to 10 and is_good.", {"json": REVIEW})
            for own in ("phone", "red bicycle", "book about cats", "cheap umbrella")
        ),
        *((f"Write a JSON object about {own}.", {"json_object": True}) for own in PLACES),
    ],
    "choice": [
        (f"Is this {question} Answer with one of: {', '.join(choices)}.", {"choice": choices})
        for choices in (["yes", "no"], ["good", "good enough", "bad"], ["A", "AB", "ABC"], ["1", "10", "100"])
        for question in ("review happy? I love it!", "number small? 7.", "sentence a question? How are you?")
    ],
    "expression": [
        ("When did the war end? Answer with a date as YYYY-MM-DD.", {"regex": r"\d{4}-\d{2}-\d{2}"}),
        *((f"What country is {own} in? One word.", {"regex": "[A-Z][a-z]{1,15}"}) for own in PLACES),
        *((f"How old is {own}? Answer with a number only.", {"regex": "[0-9]{1,3}"}) for own in NAMES),
        *((f"Say hello to {own} in one sentence.", {"regex": "[A-Za-z ,!']+[.!]"}) for own in NAMES[:3]),
    ],
    "expression without an end": [
        *((f"What country is {own} in? One word.", {"regex": "[A-Z][a-z]+"}) for own in PLACES),
        *((f"How old is {own}? Answer with a number only.", {"regex": "[0-9]+"}) for own in NAMES),
    ],
    "call": [
        *((f"How is the weather in {own}?", {}) for own in PLACES),
        *((f"What is {own}?", {}) for own in ("2 + 3", "17 plus 4, and 5 plus 6", "the sum of 100 and 250")),
        *((own, {}) for own in ("What time is it?", "Hello", "Weather in Oslo, then the time.", "Tell me a joke.")),
    ],
}
"""Prompts by the kind of their grammars."""


def answers(llm: LLM, kind: str, is_free: bool) -> list[CompletionOutput]:
    """Those to the prompts of a kind; none of calls where the model has no chat template."""
    prompts = [prompt for prompt, _ in ASKED[kind]]
    params = [
        SamplingParams(temperature=0, max_tokens=MAX_TOKENS, structured_outputs=None if is_free else own or None)
        for _, own in ASKED[kind]
    ]
    rest: dict[str, Any] = {"use_tqdm": False}
    if kind == "call":
        rest |= {"tools": TOOLS, "tool_choice": "auto" if is_free else "required"}
    try:
        outputs = llm.chat([[{"role": "user", "content": own}] for own in prompts], params, **rest)
    except InvalidPrompt:
        if kind == "call":
            return []
        outputs = llm.generate([f"Question: {own}\nAnswer:" for own in prompts], params, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def main(*models: str) -> None:
    rows = ["model | kind | end by themselves | free ones | only the free one", "--- | --- | --- | --- | ---"]
    for model in models:
        with LLM(model, max_model_len=2048, max_num_seqs=4) as llm:
            for kind in ASKED:
                held, free = (answers(llm, kind, is_free) for is_free in (False, True))
                for own in held:
                    if own.finish_reason == "length":
                        print(f"{kind}: ...{own.text[-150:]!r}")
                ends = [[own.finish_reason == "stop" for own in each] for each in (held, free)]
                missed = sum(b and not a for a, b in zip(*ends, strict=True))
                counts = (f"{sum(ends[0])} of {len(held)}", str(sum(ends[1])), str(missed))
                rows.append(" | ".join((Path(model).stem, kind, *(counts if held else ("-",) * 3))))
    print("\n".join(f"| {row} |" for row in rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
