"""The host never waits for the GPU while it launches a step: torch raises an error where it would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.modes import MODES, Mode, modes_of, running_in
from nanoengine import LLM, SamplingParams
from nanoengine.core.messages import Launched, StepPlan
from tests.e2e.small_engine import assert_idle
from tests.gpu.engines import open_llm
from tests.gpu.marks import needs_gpu
from tests.models.families import family_checkpoint
from tests.support import model_runner

PARAMS = [
    SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=20),
    SamplingParams(temperature=0.8, seed=1, ignore_eos=True, max_tokens=20),
    SamplingParams(temperature=0.8, seed=2, top_k=20, top_p=0.9, min_p=0.01, ignore_eos=True, max_tokens=20),
]


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """On a CPU nobody waits."""
    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def watch(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """The plans that were launched under watch."""
    runner, seen = model_runner(llm), []
    launch = runner.launch

    def watched(plan: StepPlan) -> Launched:
        if not plan.num_tokens:
            return launch(plan)
        seen.append(plan)
        with waiting_is_an_error():
            return launch(plan)

    monkeypatch.setattr(runner, "launch", watched)
    return seen


WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "a number is read": torch.Tensor.item,
    "a copy from memory that may be swapped out": lambda x: x.copy_(torch.zeros(1)),
}


@pytest.mark.parametrize("wait", [pytest.param(wait, marks=needs_gpu, id=name) for name, wait in WAITS.items()])
def test_waiting_is_seen(wait: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(1, device="cuda")
    with pytest.raises(RuntimeError, match="synchronizing"), waiting_is_an_error():
        wait(x)


ON_GPU = [pytest.param("cuda", mode, marks=needs_gpu, id=str(mode)) for mode in MODES]


@pytest.mark.parametrize("shape", [None, "Qwen3.5"], ids=["attention", "states"])
@pytest.mark.parametrize(("device", "mode"), [pytest.param("cpu", MODES[2], id="cpu"), *ON_GPU])
def test_launching_a_step_does_not_wait(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, mode: Mode, shape: str | None
) -> None:
    """Be it a step of decodes or one that computes prompts, of a model with or without layers that keep states."""
    folder = checkpoint if shape is None else family_checkpoint(tmp_path, shape, head_dim=16)
    with open_llm(folder, device=device) as llm:
        assert mode in modes_of(llm)
        with running_in(llm, mode):
            llm.generate([[1, 2], [3], [4, 5, 6]], PARAMS, use_tqdm=False)  # compiles, and makes what is made once
            llm.reset_prefix_cache()
            seen = watch(llm, monkeypatch)
            outputs = llm.generate([[1, 2], [3], [4, 5, 6]], PARAMS, use_tqdm=False)
            monkeypatch.undo()
        assert len(seen) >= 19
        assert any(plan.runs for plan in seen)
        assert any(len(plan.decode_rows) for plan in seen)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [20] * 3
        assert_idle(llm)
