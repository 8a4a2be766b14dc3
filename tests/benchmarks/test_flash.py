"""From which length on flash-attn 4 is chosen, with stand-ins for its functions and for time."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import flash
from benchmarks.report import Report
from nanoengine.kernels import flash_attn_4

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is made for Linux on x86-64 alone", allow_module_level=True)

from benchmarks.gpu.chain import Chain
from nanoengine.kernels.triton.tuning import DEFAULTS
from tests.kernels.formulas import DEVICE
from tests.kernels.test_flash_attn_4 import flash_attn_varlen_func

LENGTHS = [20, 40, 33]
WAYS = ["Triton", "flash-attn 4"]


@pytest.mark.parametrize(
    ("faster", "wrong", "chosen"),
    [((20, 33, 40), False, 20), ((33, 40), False, 33), ((20, 40), False, 40), ((20, 33), False, 0), ((40,), True, 0)],
    ids=str,
)
def test_it_is_chosen_from_where_on_it_is_faster_everywhere(
    monkeypatch: pytest.MonkeyPatch, faster: tuple[int, ...], wrong: bool, chosen: int
) -> None:
    def computed(*given: Tensor, **how: Any) -> Tensor:
        return flash_attn_varlen_func(*given, **how) * (1.1 if wrong else 1.0)

    def timed(_: torch.device, __: Any, ___: int) -> float:
        """Of Triton's 1; less for the other, and enough less where it is to be faster."""
        way = next(ways)
        return 0.94 if way in {f"{WAYS[1]} {length}" for length in faster} else 0.96 if way.startswith(WAYS[1]) else 1.0

    ways = iter([f"{way} {length}" for length in sorted(LENGTHS, reverse=True) for way in WAYS] + ["decode"] * 4)
    monkeypatch.setattr(flash_attn_4, "functions", lambda: SimpleNamespace(flash_attn_varlen_func=computed))
    monkeypatch.setattr(flash_attn_4, "unsupported_reason", lambda *_: None)
    monkeypatch.setattr(flash_attn_4, "LEAST_TOKENS", 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(flash, "DECODES", ([9], [5, 5]))
    monkeypatch.setattr("benchmarks.gpu.chain.seconds", timed)
    report = Report("flash", {})
    chain = Chain("tiny", DEVICE, torch.float32, 100, num_layers=1)
    args = Namespace(prompts=LENGTHS, repeat=1, replays=1)
    assert flash.flash_prompts(chain, report, DEFAULTS, args).flash_prompt == chosen
    assert (any("standard deviations" in warning for warning in report.warnings)) == wrong


def test_without_the_package_the_reason_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    chain: Any = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32, config=SimpleNamespace(head_dim=64))
    assert flash.flash_prompts(chain, Report("flash", {}), DEFAULTS, Namespace()) == DEFAULTS
    assert capsys.readouterr().out.startswith("flash-attn 4 is left out: ")
