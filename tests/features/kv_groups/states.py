"""What tests of states ask of engines, and who guesses for them."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from nanoengine import LLM, SamplingParams
from nanoengine.features.kv_groups.snapshots import Snapshots
from tests.features.speculation.scripted import Say

Answer = tuple[list[int], list[float]]
"""Tokens, and their log probabilities."""


def snapshots_of(llm: LLM) -> Snapshots:
    found = llm.built.capabilities["kv_groups"].snapshots
    assert isinstance(found, Snapshots)
    return found


def ask(llm: LLM, prompt: list[int], max_tokens: int = 20) -> tuple[int, Answer]:
    """How many of its tokens were cached, and the answer."""
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=max_tokens, ignore_eos=True, logprobs=0)
    [output] = llm.generate([prompt], params, use_tqdm=False)
    tokens, entries = output.outputs[0].token_ids, output.outputs[0].logprobs or []
    logprobs = [entry[token].logprob for token, entry in zip(tokens, entries, strict=True)]
    return output.num_cached_tokens, (tokens, logprobs)


def saying(prompts: list[list[int]], answers: list[Answer]) -> Say:
    """Who knows the answers."""
    texts = [prompt + tokens for prompt, (tokens, _) in zip(prompts, answers, strict=True)]

    def say(tokens: Seq[int], most: int) -> Seq[int]:
        known = next((text for text in texts if text[: len(tokens)] == list(tokens)), [])
        return known[len(tokens) :][:most]

    return say
