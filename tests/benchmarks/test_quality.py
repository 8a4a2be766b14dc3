"""`bench.py quality`: divergences are those of the definitions, logits those of transformers, and formats rank by bits."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import bench
from benchmarks.quality import Comparison
from tests.support import tiny_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows that blocks of 32 fill, and in one matrix of each layer blocks of 256."""
    sizes = {"hidden_size": 64, "intermediate_size": 256, "head_dim": 16}
    return tiny_checkpoint(tmp_path_factory.mktemp("quality"), **sizes)


def test_figures_are_those_of_the_definitions() -> None:
    torch.manual_seed(0)
    ours, theirs, tokens = torch.randn(150, 9), torch.randn(150, 9), torch.randint(9, (151,)).tolist()
    comparison = Comparison()
    comparison.add(ours[:70], theirs[:70], tokens[:71])
    comparison.add(ours[70:], theirs[70:], tokens[70:])
    found = comparison.figures()
    p, q = ours.softmax(1), theirs.softmax(1)
    divergences = torch.nn.functional.kl_div(q.log(), p, reduction="none").sum(1)
    assert found["kl_nats"] == pytest.approx(divergences.mean().item(), rel=1e-4)
    assert found["kl_p99_nats"] == pytest.approx(divergences.quantile(0.99).item(), rel=1e-4)
    perplexities = [
        math.exp(torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:])).item())
        for logits in (ours, theirs)
    ]
    assert found["perplexity"] == pytest.approx(perplexities[1], rel=1e-4)
    assert found["up_percent"] == pytest.approx(100 * (perplexities[1] / perplexities[0] - 1), rel=1e-3)
    assert found["same_top_share"] == pytest.approx((ours.argmax(1) == theirs.argmax(1)).float().mean().item())


def run(save: Path, *arguments: object) -> dict[str, Any]:
    assert bench.main([str(argument) for argument in ("quality", *arguments, "--save", save)]) == 0
    result: dict[str, Any] = json.loads(save.read_text())
    return result


def test_quality(model: Path, tmp_path: Path) -> None:
    weights = ("stored", "Q8_0", "Q6_K", "Q5_0", "Q4_0", "int8", "int4")
    options = ["--tokens", 128, "--window", 64, "--activations", "float32"]
    result = run(tmp_path / "saved.json", "--model", model, "--weights", *weights, *options)
    assert (result["windows"], result["texts"]) == (2, ["code", "prose"])
    figures = {row["case"]["weights"]: row["figures"] for row in result["rows"]}
    losses = {name: figures[name]["kl_nats"]["median"] for name in weights}
    assert losses["stored"] == figures["stored"]["up_percent"]["median"] == 0
    assert figures["stored"]["same_top_share"]["median"] == 1
    assert 0 < losses["Q8_0"] < losses["Q6_K"] < losses["Q5_0"] < losses["Q4_0"]
    assert losses["int8"] < losses["Q6_K"]
    assert losses["Q5_0"] < losses["int4"] < 2 * losses["Q4_0"]
