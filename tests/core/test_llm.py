"""The core alone, from prompts to text: the bundled model, compared with itself in every way of running."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from nanoengine.core.errors import InvalidConfig, InvalidPrompt
from nanoengine.core.llm import CoreLLM
from nanoengine.core.sampling_params import CoreSamplingParams

DEMO = str(Path(__file__).parents[2] / "nanoengine" / "demo")
WAYS: list[dict[str, Any]] = [
    {"num_kv_blocks": 17, "block_size": 8, "max_model_len": 130, "max_num_batched_tokens": 24},
    {"num_kv_blocks": 12, "async_scheduling": True, "scheduling_policy": "mixed"},
    {"enable_prefix_caching": False, "async_scheduling": True, "block_size": 1}
    | {"max_num_batched_tokens": 16, "long_prefill_token_threshold": 5},
]


def draw_prompts(count: int = 12) -> list[list[int]]:
    rng = random.Random(0)
    shared = [rng.randrange(4096) for _ in range(40)]
    return [
        shared[: rng.choice([0, 16, 33])] + [rng.randrange(1, 4096) for _ in range(rng.randint(1, 40))]
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def llm() -> Any:
    with CoreLLM(DEMO, dtype="float32", max_model_len=160) as made:
        yield made


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_answers_are_the_same_in_every_way_of_running(llm: CoreLLM, way: dict[str, Any]) -> None:
    prompts = draw_prompts()
    options = [{"n": 1 + i % 3, "temperature": 0.8 * (i % 2), "seed": i, "max_tokens": 4 + i} for i in range(12)]
    params = [CoreSamplingParams(top_p=0.9, **own) for own in options]  # type: ignore[arg-type]

    def answers(own: CoreLLM) -> list[list[tuple[list[int], str]]]:
        requests = [own.engine.make_request(*pair) for pair in zip(prompts, params, strict=True)]
        return [[(each.token_ids, each.text) for each in output.outputs] for output in own.run(requests)]

    expected = answers(llm)
    with CoreLLM(DEMO, **{"dtype": "float32", "max_model_len": 120} | way) as other:
        assert answers(other) == expected
        again = other.generate(prompts[2:3], params[2])
        assert other.engine.depth == 1 + way.get("async_scheduling", False)
        assert [(own.token_ids, own.text) for own in again[0].outputs] == expected[2]
        if "num_kv_blocks" in way:
            assert other.engine.scheduler.num_preemptions


def test_a_long_prompt_that_was_seen_is_cached_and_text_is_text(llm: CoreLLM) -> None:
    prompt = "def binary_search(items, wanted):\n    low, high = 0, len(items)\n    while low < high:\n"
    params = CoreSamplingParams(temperature=0.0, max_tokens=12)
    first, second = llm.generate([prompt], params)[0], llm.generate([prompt], params)[0]
    assert second.num_cached_tokens >= len(second.prompt_token_ids) - 17
    assert second.outputs[0].text == first.outputs[0].text
    tokens = first.outputs[0].token_ids
    stop = next(token for token in tokens[3:] if token not in tokens[:3])
    stopped = llm.generate([prompt], CoreSamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(stop,)))[
        0
    ].outputs[0]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert stopped.token_ids == tokens[: tokens.index(stop) + 1]
    assert first.outputs[0].text.startswith(stopped.text)


def test_mistakes_are_named(llm: CoreLLM) -> None:
    with pytest.raises(InvalidPrompt, match="must be a list"):
        llm.generate("one")
    for length in (1, 5000):
        with pytest.raises(InvalidConfig, match=f"max_model_len is {length}: it must be from 2, .* to 4096"):
            CoreLLM(DEMO, max_model_len=length)
    with pytest.raises(InvalidConfig, match="which this device does not have: lower num_kv_blocks"):
        CoreLLM(DEMO, num_kv_blocks=2**31 - 2)
