"""How many kernels a GPU is given for a step: every one costs a few microseconds, whatever it computes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from triton.runtime.interpreter import InterpretedFunction

from nanoengine import LLM, SamplingParams
from nanoengine.core.model_runner import ModelRunner
from tests.support import model_runner, tiny_checkpoint

WITHOUT_KERNELS = frozenset(
    """empty empty_like new_empty empty_strided detach alias resolve_conj resolve_neg lift_fresh unflatten view _unsafe_view
    reshape slice select split split_with_sizes transpose t unbind flatten chunk to _to_copy unsqueeze expand as_strided permute
    squeeze""".split()  # noqa: SIM905
)
"""Operations of torch that launch nothing on a GPU; conversions are counted where the dtype changes."""


class Launches(TorchDispatchMode):
    """Counts operations of torch that launch a kernel, each as one, and Triton's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        result = function(*args, **(kwargs or {}))
        if name not in WITHOUT_KERNELS or (name in ("to", "_to_copy") and result.dtype != args[0].dtype):
            self.counts[name] += 1
        return result


@contextmanager
def counting() -> Iterator[Counter[str]]:
    launches = Launches()
    getitem = InterpretedFunction.__getitem__

    def watched(kernel: Any, grid: Any) -> Any:
        launch = getitem(kernel, grid)

        def run(*args: Any, **kwargs: Any) -> Any:
            launches.counts[kernel.fn.__name__] += 1
            with torch.utils._python_dispatch._disable_current_modes():
                return launch(*args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "__getitem__", watched)
        with launches:
            yield launches.counts


def launches_of(folder: Path, num_seqs: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Of a step that decodes so many sequences, from its numbers' arrival to the tokens."""
    found: list[Counter[str]] = []
    compute = ModelRunner._compute

    def watched(runner: ModelRunner, plan: Any) -> Any:
        if plan.runs:
            return compute(runner, plan)
        with counting() as counts:
            reads = compute(runner, plan)
        found.append(counts)
        return reads

    monkeypatch.setattr(ModelRunner, "_compute", watched)
    options: dict[str, Any] = {"kernels": "triton", "attention_backend": "triton", "num_kv_blocks": 30}
    with LLM(str(folder), device="cpu", dtype="float32", max_model_len=64, use_tqdm=False, **options) as llm:
        assert model_runner(llm).kernels.name == "triton"
        params = SamplingParams(temperature=0.8, max_tokens=3, ignore_eos=True)
        llm.generate([[i + 1] for i in range(num_seqs)], params, use_tqdm=False)
    return found[-1]


@pytest.mark.parametrize(("num_seqs", "per_layer"), [(8, 6), (9, 9)])
def test_launches_of_a_decode_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_seqs: int, per_layer: int
) -> None:
    """Of few rows: the first norm and q, k, v; their norms, rotation and write; attention; its projection; the second norm and
    the gates; the way down. Of more, both norms and the gate are kernels of their own. Beside layers there are 10.
    """
    counts = launches_of(tiny_checkpoint(tmp_path, num_hidden_layers=1), num_seqs, monkeypatch)
    assert sum(counts.values()) == 10 + per_layer, counts
