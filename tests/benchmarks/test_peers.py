from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.peers import ContinuousBatching, Generate
from benchmarks.random_weights import write_checkpoint
from benchmarks.workload import Workload
from nanoengine import LLM

WORKLOAD = Workload([[1] * 5, [2] * 9, [3] * 2], output_lens=[4, 1, 7])
CPU = torch.device("cpu")


@pytest.mark.parametrize(("kv_tokens", "num_batches"), [(33, 2), (1, 3)])
def test_generate_makes_the_wanted_tokens_in_batches_that_fit(tiny: Path, kv_tokens: int, num_batches: int) -> None:
    peer = Generate(tiny, torch.float32, CPU, kv_tokens)
    run = peer.run(WORKLOAD)
    assert [len(request.token_times) for request in run.requests] == [4, 1, 7]
    firsts = [request.token_times[0] for request in run.requests]
    assert len(set(firsts)) == num_batches, "requests of one batch get their first token together"
    assert firsts == sorted(firsts)
    assert all(request.token_times == sorted(request.token_times) for request in run.requests)
    assert run.seconds >= run.requests[-1].token_times[-1]
    assert ContinuousBatching(peer.model, kv_tokens=2560, max_num_seqs=4).run(WORKLOAD).seconds > 0


def test_random_weights_are_the_same_every_time_and_load(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        write_checkpoint("tiny", str(folder))
    a, b = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert a == b
    with LLM(str(folders[0]), tokenizer="demo", num_kv_blocks=64, max_model_len=128, use_tqdm=False) as llm:
        assert llm.built.models.model_config.dtype == "bfloat16"
