"""States in a real engine: what is kept behind drafts, and in how much memory. All ways of running: tests/e2e/one_number.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nanoengine import LLM, SamplingParams
from nanoengine.kernels.native.support import unsupported_reason
from tests.features.kv_groups.states import saying, snapshots_of
from tests.features.speculation.scripted import Scripted
from tests.models.families import engine, family_checkpoint

REASON = unsupported_reason(torch.device("cpu"), torch.float32)


def ask(llm: LLM, prompts: list[list[int]], max_tokens: int = 30) -> list[tuple[list[int], list[float]]]:
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=max_tokens, ignore_eos=True, logprobs=0)
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    return [
        (own.token_ids, [entry[token].logprob for token, entry in zip(own.token_ids, own.logprobs or [], strict=True)])
        for own in outputs
    ]


@pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")
def test_a_conversation_goes_on_behind_an_answer_whose_last_tokens_were_drafts(tmp_path: Path) -> None:
    """A block ended inside a run of accepted drafts: its state is kept. The last run has filled a block, whose state is not."""
    folder, prompt = family_checkpoint(tmp_path, "Qwen3.5"), list(range(100, 117))
    with engine(folder, max_num_seqs=1, enable_prefix_caching=False) as llm:
        [(tokens, _)] = right = ask(llm, [prompt], max_tokens=32)
        turn = [*prompt, *tokens, 7, 8, 9]
        then = ask(llm, [turn])
    with engine(folder, speculation="ngram", num_drafts=7) as llm:
        speculation = llm.built.capabilities["speculation"].speculation
        speculation.proposer = Scripted(saying([prompt], right))
        assert ask(llm, [prompt], max_tokens=32) == right
        assert llm.metrics.speculation.num_accepted > 20
        cached = llm.metrics.cache.num_hit_tokens
        assert ask(llm, [turn]) == then
        assert llm.metrics.cache.num_hit_tokens - cached == 32


def test_snapshots_take_no_more_than_their_memory(tmp_path: Path) -> None:
    folder = family_checkpoint(tmp_path, "LFM2")
    size = 4 * 3 * 2 * 48  # of a state: 3 layers, 2 inputs of 48 channels
    for memory, count in ((10 * size, 10), (10 * size - 1, 9), (2**30, 100)):  # no more than blocks
        with engine(folder, snapshot_memory=memory) as llm:
            assert snapshots_of(llm).num_slots == count
