"""Models whose layers have states on an NVIDIA GPU in float32: right to transformers and the CPU, however they run; and their
kernels in real sizes: the same bits however a sequence is cut.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.modes import MODES, Mode, modes_of, running_in
from nanoengine import LLM, RequestOutput, SamplingParams
from nanoengine.features.kv_groups.state_pool import StateKeeper
from nanoengine.kernels import recurrences as reference
from nanoengine.kernels.recurrences import Decay, StateRuns, Stores
from tests.e2e.small_engine import assert_idle
from tests.features.kv_groups.states import saying, snapshots_of
from tests.features.speculation.scripted import Scripted, erring
from tests.gpu.marks import needs_gpu
from tests.gpu.test_demo_on_gpu import clear_tokens
from tests.gpu.test_waiting_on_gpu import waiting_is_an_error, watch
from tests.models.families import WITH_STATES, engine, family_checkpoint
from tests.support import backend_of, fill_kv_with_nan, forced_logits, model_runner, reference_logits, reference_model

TOKENS = torch.randint(0, 250, (75,), generator=torch.Generator().manual_seed(0)).tolist()
FAMILIES = ("LFM2", "Qwen3.5", "Qwen3-Next", "Granite 4")
NEW = 30
SLACK = 1 << 30
"""CUDA's own memory for a process and its kernels."""


def cases(shapes: Iterable[str]) -> Any:
    """All on the GPU, and one on the CPU, which says whether the tests are right."""
    own = [pytest.param(shape, "cuda", marks=needs_gpu, id=f"{shape}, cuda") for shape in shapes]
    return pytest.mark.parametrize(("shape", "device"), [pytest.param("LFM2", "cpu", id="LFM2, cpu"), *own])


def on(device: str) -> dict[str, str]:
    """On a CPU by plain torch: nothing has to be compiled."""
    kernels = "torch" if device == "cpu" else "triton"
    return {"device": device, "kernels": kernels, "attention_backend": kernels}


def checkpoint(folder: Path, shape: str, **more: Any) -> Path:
    """Heads of a power of two, as Triton's attention wants them."""
    return family_checkpoint(folder, shape, head_dim=16, **more)


@cases(WITH_STATES)
def test_logits_are_those_of_transformers(tmp_path: Path, shape: str, device: str) -> None:
    """On the CPU first: if they differ there, the GPU is not to blame, but this version of transformers, or the case."""
    folder = checkpoint(tmp_path, shape)
    exact = reference_logits(reference_model(folder), TOKENS)
    for name in dict.fromkeys(("cpu", device)):
        with engine(folder, **on(name)) as llm:
            if name == "cuda":
                assert (model_runner(llm).kernels.name, backend_of(llm).name) == ("triton", "triton")
            for chunk in (60, 17):
                logits = forced_logits(llm, TOKENS, num_prompt_tokens=60, chunk=chunk)
                error = float((logits.cpu() - exact).abs().max())
                assert error <= 1e-3, name
                fill_kv_with_nan(llm)


# ---- engines


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    shared = [rng.randrange(250) for _ in range(70)]
    return [
        shared[: rng.choice([0, 40, 70])] + [rng.randrange(250) for _ in range(rng.randint(1, 60))] for _ in range(8)
    ]


def ask(llm: LLM, asked: list[list[int]]) -> list[RequestOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, logprobs=2)
    outputs = llm.generate(asked, params, use_tqdm=False)
    assert_idle(llm)
    return outputs


WAYS: dict[str, dict[str, Any]] = {
    "room": {},
    "small mixed steps": {"max_num_batched_tokens": 7, "max_num_seqs": 3, "scheduling_policy": "mixed"},
    "tiny pool": {"num_kv_blocks": 33},
    "drafts": {"num_kv_blocks": 60, "speculation": "ngram", "num_drafts": 5},
}


@cases(FAMILIES)
def test_tokens_are_those_of_the_cpu_in_every_way_and_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str, device: str
) -> None:
    """Up to the first that hangs on a thread. What the host does for states never waits for the device."""
    folder, asked, counts = checkpoint(tmp_path, shape), prompts(), dict.fromkeys(WAYS, 0)
    with engine(folder, **on("cpu"), max_num_seqs=1, enable_prefix_caching=False) as llm:
        alone = [ask(llm, [prompt])[0] for prompt in asked]
    exact = [clear_tokens(output) for output in alone]
    assert sum(map(len, exact)) > 0.6 * NEW * len(asked), "hardly any token is a close call"
    answers: list[tuple[list[int], list[float]]] = [(output.outputs[0].token_ids, []) for output in alone]
    for name, way in WAYS.items():
        with engine(folder, **{"max_model_len": 400, "max_num_seqs": 16} | on(device) | way) as llm:
            if name == "drafts":
                speculation = llm.built.capabilities["speculation"].speculation
                speculation.proposer = Scripted(erring(0.3)(saying(asked, answers)))
            ask(llm, asked)  # compiles, and makes what is made once
            watch_keeper(monkeypatch)
            for mode in modes_of(llm) if device == "cuda" else MODES[3:]:
                llm.reset_prefix_cache()
                fill_kv_with_nan(llm)
                with running_in(llm, mode):
                    for _ in range(2):  # again from the cache
                        found = [output.outputs[0].token_ids for output in ask(llm, asked)]
                        same = [tokens[: len(clear)] for tokens, clear in zip(found, exact, strict=True)]
                        assert same == exact, (name, str(mode))
            monkeypatch.undo()
            assert (model_runner(llm).recorder is not None) or device == "cpu"
            stats = llm.metrics.speculation
            counts[name] = {
                "room": snapshots_of(llm).num_taken,
                "small mixed steps": snapshots_of(llm).num_restored,
                "tiny pool": llm.metrics.num_preemptions,
                "drafts": 0 if stats is None else min(stats.num_accepted, stats.num_drafts - stats.num_accepted),
            }[name]
    assert all(counts.values()), counts


def watch_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    def watched(method: Callable[..., None]) -> Callable[..., None]:
        def call(*given: Any) -> None:
            with waiting_is_an_error():
                method(*given)

        return call

    for name in ("begin", "before_forward"):
        monkeypatch.setattr(StateKeeper, name, watched(getattr(StateKeeper, name)))


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=needs_gpu, id=str(mode)) for mode in MODES])
def test_launching_a_step_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Mode) -> None:
    with engine(checkpoint(tmp_path, "Qwen3.5"), device="cuda", max_num_seqs=16) as llm, running_in(llm, mode):
        assert mode in modes_of(llm)
        ask(llm, prompts())
        llm.reset_prefix_cache()
        seen = watch(llm, monkeypatch, prompts=True)
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=20)
        llm.generate(prompts(), params, use_tqdm=False)
        monkeypatch.undo()
    assert any(plan.runs for plan in seen)
    assert any(len(plan.decode_rows) for plan in seen)


# ---- memory


@pytest.mark.parametrize("utilization", [pytest.param(own, marks=needs_gpu, id=str(own)) for own in (0.3, 0.9)])
def test_states_are_counted_where_the_pool_is_sized(tmp_path: Path, utilization: float) -> None:
    """Slots of 6 MiB: those of 256 sequences and of the snapshots take 2.6 GB, more than what is tolerated below. K/V of 256
    sequences would take 512 GiB, more than a card has: the pool's size follows from the memory alone.
    """
    large = {f"linear_num_{own}_heads": count for own, count in (("key", 16), ("value", 32))}
    large |= {f"linear_{own}_head_dim": 128 for own in ("key", "value")}
    large |= {"num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 1 << 20}
    folder = checkpoint(tmp_path, "Qwen3.5", **large)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    options: dict[str, Any] = {"num_kv_blocks": None, "block_size": 256, "gpu_memory_utilization": utilization}
    with engine(folder, device="cuda", dtype="bfloat16", **options) as llm:
        runner = model_runner(llm)
        [states] = [part.pool.slots.nbytes for part in runner.parts if isinstance(part, StateKeeper)]
        assert states > 2 * SLACK
        ask(llm, [[i + j for j in range(90)] for i in range(160)])
        used = total - torch.cuda.mem_get_info()[0]
        assert used <= utilization * total + SLACK
        pool = sum(tensor.nbytes for place in runner.kv_cache.places for tensor in place)
        assert pool + states > utilization * total - (total - free) - 8 * SLACK, "no more is left over than steps take"


# ---- kernels in real sizes


class Sizes:
    """Projections of some tokens of Qwen3-Next, Granite 4 or LFM2, and what their kernels make of runs of them."""

    def __init__(self, kind: str, dtype: torch.dtype, num_tokens: int):
        self.kind, self.decay = kind, Decay(torch.rand(48), torch.randn(48))
        self.skip, self.filters = torch.randn(48), torch.randn(4, 8192)
        self.widths = {"delta rule": (8192, 32, 32), "mamba2": (3328, 48), "conv": (8192,)}[kind]
        self.shape = {"delta rule": (32, 128, 128), "mamba2": (48, 128, 64), "conv": (3, 8192)}[kind]
        # Rows lie apart by no multiple of 16 bytes: some are aligned, others not.
        self.x = torch.randn(num_tokens, sum(self.widths) + 3).to(dtype)[:, : sum(self.widths)]

    def mix(self, kernels: Any, x: Tensor, states: Tensor, runs: StateRuns) -> Tensor:
        first, *others = x.split(self.widths, dim=1)
        if self.kind == "conv":
            return kernels.short_conv(first, self.filters, None, states, runs, silu=True)
        decay = Decay(*(own[: self.shape[0]] for own in self.decay))
        if self.kind == "delta rule":
            return kernels.delta_rule(first, *others, decay, 16, states, runs)
        return kernels.mamba2(first / 8, *others, decay, self.skip, 1, states, runs)


@pytest.fixture
def on_gpu() -> Iterator[None]:
    with torch.device("cuda"):
        yield


def ints(values: Any) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def runs_of(slots: list[int], lens: list[int]) -> StateRuns:
    return StateRuns(ints(slots), ints(accumulate(lens, initial=0)))


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", [pytest.param(own, marks=needs_gpu) for own in ("delta rule", "mamba2", "conv")])
def test_bits_do_not_depend_on_cuts_in_real_sizes(kind: str, dtype: torch.dtype) -> None:
    """One long run alone, in chunks, token by token beside 60 others, and with snapshots that the rest begins from."""
    from nanoengine.kernels.triton.operations import TritonKernels

    torch.manual_seed(0)
    kernels, count, slots = TritonKernels(), 333, 70
    sizes = Sizes(kind, dtype, count)
    begun = torch.full((slots, *sizes.shape), float("nan"))
    begun[3] = torch.randn(sizes.shape) / 4
    states, right = begun.clone(), begun[:4].clone()
    out = sizes.mix(kernels, sizes.x, states, runs_of([3], [count]))
    close = {"rtol": 2e-3, "atol": 2e-3} if out.dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(out, sizes.mix(reference, sizes.x, right, runs_of([3], [count])), **close)
    torch.testing.assert_close(states[3], right[3], rtol=2e-3, atol=2e-3)
    for lens in ([1, 2, 3, 60, 200, 67], [332, 1]):
        own, first = begun.clone(), 0
        for length in lens:
            part = slice(first, first + length)
            assert torch.equal(sizes.mix(kernels, sizes.x[part], own, runs_of([3], [length])), out[part])
            first += length
        assert torch.equal(own[3], states[3])
        assert own[4:].isnan().all()

    own, places = begun.clone(), torch.arange(64)
    own[4:64] = 0
    for token in range(0, count, 7):  # chunks of 6 alone, and one token among many
        tokens = sizes.x[places % count]
        tokens[5] = sizes.x[token]
        rows = [4, 5, 6, 7, 8, 3, *range(9, 64), *[69] * 3]
        assert torch.equal(sizes.mix(kernels, tokens, own, runs_of(rows, [1] * 64))[5], out[token])
        rest = sizes.x[token + 1 : token + 7]
        if len(rest):
            sizes.mix(kernels, rest, own, runs_of([3], [len(rest)]))
    assert torch.equal(own[3], states[3])

    own, cut = begun.clone(), 130
    keeps = Stores(ints([0, 3]), ints([cut, count - 1, count - 1]), ints([66, 67, 3]))
    assert torch.equal(sizes.mix(kernels, sizes.x, own, runs_of([3], [count])._replace(stores=keeps)), out)
    assert torch.equal(own[67], states[3])
    assert torch.equal(own[3], states[3])
    rest = sizes.x[cut + 1 :]
    assert torch.equal(sizes.mix(kernels, rest, own, runs_of([66], [len(rest)])), out[cut + 1 :])
    assert torch.equal(own[66], states[3])
