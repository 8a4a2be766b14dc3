"""What tests of states ask of engines, and who guesses for them."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from nanoengine import LLM
from nanoengine.features.kv_groups.snapshots import Snapshots
from tests.features.speculation.scripted import Say


def snapshots_of(llm: LLM) -> Snapshots:
    found = llm.built.capabilities["kv_groups"].snapshots
    assert isinstance(found, Snapshots)
    return found


def saying(prompts: list[list[int]], answers: list[tuple[list[int], list[float]]]) -> Say:
    """Who knows the answers."""
    texts = [prompt + tokens for prompt, (tokens, _) in zip(prompts, answers, strict=True)]

    def say(tokens: Seq[int], most: int) -> Seq[int]:
        known = next((text for text in texts if text[: len(tokens)] == list(tokens)), [])
        return known[len(tokens) :][:most]

    return say
