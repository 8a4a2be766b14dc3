"""Recorded decode steps, and the memory that is left for K/V where steps and recordings take some of it first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nanoengine import SamplingParams
from nanoengine.attention.backend import AttentionMetadata
from nanoengine.attention.torch_reference import TorchAttention
from nanoengine.errors import InvalidConfig, KVCacheTooSmall
from nanoengine.kernels.torch_kernels import TorchKernels
from nanoengine.runner import model_runner as module
from nanoengine.runner.graphs import bucket_sizes
from nanoengine.runner.model_runner import ModelRunner
from tests.runner.batches import TABLES, chain, decode, execute, prefill
from tests.runner.conftest import MakeRunner
from tests.runner.fake_stream import FakeStream

# ---- recorded steps


def repeats(runner: ModelRunner) -> dict[int, int]:
    """{bucket: how often its recording was repeated}, without those that were not."""
    assert runner.graphs is not None
    assert isinstance(runner.stream, FakeStream)
    recordings = zip(runner.graphs.buckets[::-1], runner.stream.recordings, strict=True)
    return {size: recording.num_repeats for size, recording in recordings if recording.num_repeats}


def test_every_size_of_a_decode_step_is_recorded(make: MakeRunner, recordable: dict[str, Any]) -> None:
    runner = make(**recordable)
    assert runner.uses_graphs
    assert runner.graphs is not None
    assert runner.graphs.buckets == bucket_sizes(6) == [1, 2, 4, 6]
    assert "4 CUDA graphs" in runner.describe()
    assert runner.kv_cache is not None
    assert not any(tensor.any() for layer in runner.kv_cache.layers for tensor in layer), "padding writes nothing"
    assert not runner.rows.newest[:-1].any(), "and into no sequence's row"


@pytest.mark.parametrize("params", [{}, {"temperature": 1.5}, {"temperature": 0.9, "top_k": 9, "top_p": 0.8}], ids=str)
def test_recorded_steps_sample_the_same_tokens(
    make: MakeRunner, recordable: dict[str, Any], params: dict[str, Any]
) -> None:
    right, runner = make(max_num_seqs=6, kernels="torch"), make(**recordable)
    batches = [chain({row: TABLES[row] for row in rows}, 6, **params) for rows in ([0], [0, 2], [2, 0, 5])]
    expected = [[execute(right, batch).token_ids for batch in some] for some in batches]
    assert len({tuple(tokens) for some in expected for tokens in some}) > 5
    assert [[execute(runner, batch).token_ids for batch in some] for some in batches] == expected
    assert repeats(runner) == {1: 6, 2: 6, 4: 6}


def test_recorded_steps_may_overlap(make: MakeRunner, recordable: dict[str, Any]) -> None:
    """They write their tokens to one place: each step must take them away before the next."""
    right, runner = make(max_num_seqs=6, kernels="torch"), make(**recordable)
    expected = [execute(right, batch).token_ids for batch in chain(TABLES, 6)]
    steps = [runner.launch(batch) for batch in chain(TABLES, 6)]
    assert steps[-1].result().token_ids == expected[-1]
    assert [step.result().token_ids for step in steps] == expected
    assert repeats(runner) == {4: 6}


def test_padding_of_a_recorded_step_touches_no_sequence(make: MakeRunner, recordable: dict[str, Any]) -> None:
    runner = make(**recordable)
    assert runner.kv_cache is not None
    runner.kv_cache.fill(0.0)
    runner.rows.newest.fill_(7)
    execute(runner, decode((2, 0, 50), (5, 0, 51), (0, 0, 52), tables=TABLES))
    written = {
        int(block)
        for layer in runner.kv_cache.layers
        for tensor in layer
        for block in tensor.flatten(1).any(1).nonzero()
    }
    assert written == {1, 4, 5}
    assert runner.rows.newest[[1, 3, 4]].tolist() == [7] * 3


@pytest.mark.parametrize(
    "change",
    [{"logprobs": 2}, {"banned": (3,)}, {"prefill": True}],
    ids=["log probabilities", "bans", "prefill"],
)
def test_other_steps_are_not_recorded_ones(
    make: MakeRunner, recordable: dict[str, Any], change: dict[str, Any]
) -> None:
    runner, right = make(**recordable), make(max_num_seqs=6, kernels="torch")
    batch = prefill(1) if change.get("prefill") else decode((2, 0, 50), (5, 0, 51), tables=TABLES)
    for row in batch.sampling:
        row.params = SamplingParams(temperature=0, logprobs=change.get("logprobs"))
        row.banned_token_ids = change.get("banned", ())
    assert execute(runner, batch) == execute(right, batch)
    assert repeats(runner) == {}


@pytest.mark.parametrize("what", ["stream", "kernels", "attention", "enforce_eager"])
def test_nothing_is_recorded_where_something_cannot_be(
    make: MakeRunner, recordable: dict[str, Any], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    match what:
        case "stream":
            recordable["stream"] = FakeStream()
        case "kernels":
            monkeypatch.setattr(TorchKernels, "capturable", False)
        case "attention":
            monkeypatch.setattr(TorchAttention, "capturable", False)
        case "enforce_eager":
            recordable["enforce_eager"] = True
    runner = make(**recordable)
    assert not runner.uses_graphs
    assert runner.graphs is None
    assert runner.stream.recordings == []  # type: ignore[attr-defined]
    assert "no CUDA graphs" in runner.describe()
    execute(runner, decode((2, 0, 50), tables=TABLES))


def test_a_closed_runner_lets_go_of_its_recordings(make: MakeRunner, recordable: dict[str, Any]) -> None:
    runner = make(**recordable)
    runner.close()
    assert runner.graphs is None
    assert not hasattr(runner, "rows")


# ---- measuring a GPU


def fake_cuda(monkeypatch: pytest.MonkeyPatch, free: tuple[int, ...] = ()) -> None:
    """All of the sizing but the GPU: the steps run on the CPU, and torch.cuda answers from the facts below.

    Args:
        free: bytes that are free, question after question, before at last 90,000 are.
    """
    answers = iter(free)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 300)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _device: 1000)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (next(answers, 90_000), 100_000))


def test_the_gpu_pool_is_what_a_step_of_full_size_leaves(make: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch)
    runner = make(max_num_batched_tokens=1100, max_num_seqs=7, gpu_memory_utilization=0.5)
    sizes = []
    forward = runner.model.forward

    def counting(input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        sizes.append(len(input_ids))
        return forward(input_ids, positions, metadata)

    monkeypatch.setattr(runner.model, "forward", counting)
    assert runner._measure_gpu_kv_bytes() == 50_000 - 10_000 - 700
    assert sizes == [1100, 1100, 7], "prefills of few and of many prompts, then the largest decode step"


@pytest.mark.parametrize(
    ("max_num_seqs", "free", "graph_bytes"),
    [
        (6, (80_000, 75_000, 74_800), 5_000 + 3 * 200),  # [1, 2, 4, 6]
        (17, (80_000, 75_000, 74_800), 5_000 + 5 * 200),  # [1, 2, 4, 8, 16, 17]
        (6, (80_000, 75_000, 76_000), 5_000),  # somebody gave memory back meanwhile
        (1, (80_000, 75_000), 5_000),  # there is no other
    ],
    ids=str,
)
def test_the_gpu_pool_leaves_room_for_the_graphs(
    make: MakeRunner,
    recordable: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    max_num_seqs: int,
    free: tuple[int, ...],
    graph_bytes: int,
) -> None:
    """The largest is recorded, and one more: each further one takes as much as that."""
    runner = make(**recordable | {"max_num_seqs": max_num_seqs, "gpu_memory_utilization": 0.5})
    runner.stream.recordings.clear()  # type: ignore[attr-defined]
    fake_cuda(monkeypatch, free)
    assert runner._measure_gpu_kv_bytes() == 50_000 - 10_000 - 700 - graph_bytes
    assert len(runner.stream.recordings) == len(free) - 1  # type: ignore[attr-defined]


def test_the_gpu_pool_of_a_step_that_does_not_fit_names_the_knobs(
    make: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    fake_cuda(monkeypatch)
    runner = make(max_num_batched_tokens=1100, max_num_seqs=7)
    monkeypatch.setattr(runner, "_run", out_of_memory)
    with pytest.raises(KVCacheTooSmall, match=r"max_num_batched_tokens 1100 or max_num_seqs 7") as raised:
        runner._measure_gpu_kv_bytes()
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)


def test_weights_or_graphs_that_do_not_fit_are_named_errors(
    make: MakeRunner, recordable: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "_record_graphs", out_of_memory)
        with pytest.raises(KVCacheTooSmall, match=r"CUDA graphs do not fit beside the KV pool: .*enforce_eager=True"):
            make(**recordable)
    monkeypatch.setattr(module, "build_model", out_of_memory)
    with pytest.raises(InvalidConfig, match=r"the weights take \d+ bytes, more than is free on cpu"):
        make()
