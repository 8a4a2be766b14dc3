"""States on a device on which time passes: recorded decodes with padding, chunks, drafts and snapshots, two steps in flight."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoengine import LLM, SamplingParams
from nanoengine.core.device import Device
from nanoengine.core.errors import InvalidConfig
from tests.e2e.late import late_device
from tests.e2e.small_engine import assert_idle
from tests.features.kv_groups.states import saying, snapshots_of
from tests.features.speculation.scripted import Scripted, erring
from tests.models.families import engine, family_checkpoint
from tests.support import backend_of, model_runner

LAYERS = {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2}
SHARED = [7 * i % 250 for i in range(34)]
PROMPTS = [SHARED + [i, 3 * i + 1] * (1 + 2 * i) for i in range(5)]


def checkpoint(folder: Path) -> Path:
    """Of one family; of the others: tests/e2e/one_number.py."""
    return family_checkpoint(folder, "Qwen3.5", num_hidden_layers=2, head_dim=16, **LAYERS)


def ask(llm: LLM, numbers: Iterable[int], max_tokens: int) -> list[list[int]]:
    """What is said to some of the prompts."""
    params = {
        i: SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=max_tokens, ignore_eos=True) for i in numbers
    }
    outputs = llm.generate([PROMPTS[i] for i in params], list(params.values()), use_tqdm=False)
    assert_idle(llm)
    return [output.outputs[0].token_ids for output in outputs]


def test_late_and_recorded_steps_say_what_others_say(tmp_path: Path) -> None:
    folder, everyone = checkpoint(tmp_path), range(len(PROMPTS))
    with engine(folder, kernels="torch", max_num_seqs=1, enable_prefix_caching=False, max_model_len=128) as llm:
        right = [ask(llm, [i], 24)[0] for i in everyone]
    options: dict[str, Any] = {"kernels": "torch", "async_scheduling": True, "max_num_batched_tokens": 40}
    options |= {"max_model_len": 128, "max_num_seqs": 5}
    ways: tuple[dict[str, Any], ...] = (
        {"num_kv_blocks": 11},
        {"num_kv_blocks": 40, "speculation": "ngram", "num_drafts": 4},
    )
    for seed, way in enumerate(ways):
        with late_device(can_record=True, seed=seed) as device, engine(folder, **options | way) as llm:
            if "speculation" in way:
                speculation, answers = llm.built.capabilities["speculation"].speculation, [(own, []) for own in right]
                speculation.proposer = Scripted(erring(0.3)(saying(PROMPTS, answers)))
            for _ in range(2):
                assert ask(llm, everyone, 24) == right
            assert snapshots_of(llm).num_restored
            assert sum(recording.num_replays for recording in device.recordings)
            if "speculation" in way:
                stats = llm.metrics.speculation
                assert stats is not None
                assert stats.num_drafts > stats.num_accepted > 0
            else:
                assert llm.metrics.num_preemptions


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_triton_kernels_all_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, which is slow: few tokens, recorded and overlapping, in chunks, a snapshot inside of one; and a
    few programs for attention.
    """
    pytest.importorskip("triton", reason="Triton is made for Linux on x86-64 alone")
    folder = checkpoint(tmp_path)
    few: dict[str, Any] = {"num_kv_blocks": 14, "max_num_batched_tokens": 22, "max_num_seqs": 3, "max_model_len": 64}
    with engine(folder, kernels="torch", attention_backend="torch", **few) as llm:
        expected = ask(llm, [1, 2], 3)
    few |= {"kernels": "triton", "attention_backend": "triton", "async_scheduling": True}
    monkeypatch.setattr("nanoengine.kernels.triton.attention.paged_decode.num_multiprocessors", lambda *_: 4)
    with late_device(can_record=True, seed=0) as device, engine(folder, **few) as llm:
        assert (model_runner(llm).kernels.name, backend_of(llm).name) == ("triton", "triton")
        assert ask(llm, [1, 2], 3) == expected
        assert snapshots_of(llm).num_stored
    assert sum(recording.num_replays for recording in device.recordings) > 0


# ---- memory


def test_states_are_counted_where_the_pool_is_sized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = family_checkpoint(tmp_path, "LFM2")
    slot, block = 4 * 3 * 2 * 48, 4 * 2 * 2 * 12 * 16  # 3 layers of 2 inputs of 48 channels; a layer of 2 heads of 12
    available, options = 500 * block, {"snapshot_memory": 20 * slot, "num_kv_blocks": None}
    monkeypatch.setattr(Device, "available", lambda _: available)
    for rows in (20, 60):
        with engine(folder, **options, max_num_seqs=rows) as llm:
            states = (rows + 1 + 20) * slot
            assert llm.engine.scheduler.blocks.num_blocks == (available - states) // 2 // block - 1
    with pytest.raises(InvalidConfig, match="lower max_num_seqs or snapshot_memory"):
        engine(folder, **options, max_num_seqs=2000)
