"""Every architecture that the modules of transformers compute here: greedy tokens and their log probabilities are transformers'.

`python -m benchmarks.architectures --write` makes `expected.json`, with more tokens than these.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from benchmarks.architectures.checkpoints import make
from benchmarks.architectures.judge import Outcome, judge
from benchmarks.architectures.sizes import WINDOW

EXPECTED = json.loads((Path(__file__).parent / "expected.json").read_text())
PROMPT_LENGTHS, NEW_TOKENS, CHUNK = (7, 45), 12, 32
REFUSED = {
    "BloomForCausalLM": "cannot be told at which positions its tokens stand",
    "DeepseekV32ForCausalLM": "asks for attention with indices",
    "MiniMaxForCausalLM": "mixes tokens outside of its attention",
    "MambaForCausalLM": "has layers with recurrent states",
    "OpenAIGPTLMHeadModel": "computes its attention itself",
}


def judged(name: str, folder: Path) -> Outcome:
    if not hasattr(transformers, name.partition(":")[0]):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    make(name, folder)
    return judge(folder, PROMPT_LENGTHS, NEW_TOKENS, max_model_len=64, max_num_batched_tokens=CHUNK)


@pytest.mark.parametrize("name", [name for name, kind in EXPECTED.items() if kind == "transformers"])
def test_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    outcome = judged(name, tmp_path)
    assert outcome.kind == "transformers", str(outcome)


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_modules_cannot_compute_here_is_refused(tmp_path: Path, name: str) -> None:
    outcome = judged(name, tmp_path)
    assert outcome.kind == EXPECTED[name] == "refused"
    assert REFUSED[name] in outcome.reason


def test_prompts_are_longer_than_windows_and_chunks() -> None:
    assert max(PROMPT_LENGTHS) > CHUNK > WINDOW
    assert set(EXPECTED.values()) <= {"nanoengine", "transformers", "refused", "not made"}
