"""States in a real engine: what is kept behind drafts, and in how much memory. All ways of running: tests/e2e/one_number.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nanoengine.kernels.native.support import unsupported_reason
from tests.features.kv_groups.states import ask, saying, snapshots_of
from tests.features.speculation.scripted import Scripted
from tests.models.families import engine, family_checkpoint

REASON = unsupported_reason(torch.device("cpu"), torch.float32)


@pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")
def test_a_conversation_goes_on_behind_an_answer_whose_last_tokens_were_drafts(tmp_path: Path) -> None:
    """A block ended inside a run of accepted drafts: its state is kept. The last run has filled a block, whose state is not."""
    folder, prompt = family_checkpoint(tmp_path, "Qwen3.5"), list(range(100, 117))
    with engine(folder, max_num_seqs=1, enable_prefix_caching=False) as llm:
        _, right = ask(llm, prompt, 32)
        turn = [*prompt, *right[0], 7, 8, 9]
        _, then = ask(llm, turn)
    with engine(folder, speculation="ngram", num_drafts=7) as llm:
        speculation = llm.built.capabilities["speculation"].speculation
        speculation.proposer = Scripted(saying([prompt], [right]))
        assert ask(llm, prompt, 32) == (0, right)
        assert llm.metrics.speculation.num_accepted > 20
        assert ask(llm, turn) == (32, then)


def test_snapshots_take_no_more_than_their_memory(tmp_path: Path) -> None:
    folder = family_checkpoint(tmp_path, "LFM2")
    size = 4 * 3 * 2 * 48  # of a state: 3 layers, 2 inputs of 48 channels
    for memory, count in ((10 * size, 10), (10 * size - 1, 9), (2**30, 100)):  # no more than blocks
        with engine(folder, snapshot_memory=memory) as llm:
            assert snapshots_of(llm).num_slots == count
