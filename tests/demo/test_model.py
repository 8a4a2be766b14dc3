"""The bundled model: small, complete, and better at predicting code than a compressor."""

from __future__ import annotations

import lzma
import math
import re
from pathlib import Path

import pytest

from benchmarks.demo_model.corpus import read_documents, standard_library
from nanoengine import LLM
from nanoengine.core.model_config import read_json
from nanoengine.models.names import DEMO
from tests.support import forced_logits


def test_it_is_under_20_megabytes_and_between_4_and_10_million_parameters(demo_llm: LLM) -> None:
    assert sum(path.stat().st_size for path in DEMO.iterdir() if path.is_file()) < 20_000_000
    assert 4_000_000 < demo_llm.built.models.num_parameters < 10_000_000
    assert read_json(DEMO, "config.json")["dtype"] == "bfloat16"


def test_it_needs_fewer_bits_than_xz_for_modules_that_it_never_saw(demo_llm: LLM) -> None:
    listed = (DEMO / "heldout.txt").read_text().split()
    assert len(listed) >= 25
    documents = sorted((d for d in read_documents(standard_library()) if d.path in listed), key=lambda d: len(d.text))
    if len(documents) < 3:
        pytest.skip("this Python's standard library no longer has the held-out modules")
    bits = size = 0.0
    for document in documents[:3]:
        ids = [0, *demo_llm.tokenizer.encode(document.text)]
        logprobs = forced_logits(demo_llm, ids, num_prompt_tokens=len(ids), chunk=len(ids)).log_softmax(-1)
        bits -= logprobs[range(len(ids) - 1), ids[1:]].sum().item() / math.log(2)
        size += len(document.text.encode())
    packed = lzma.compress("".join(d.text for d in documents[:3]).encode(), preset=9 | lzma.PRESET_EXTREME)
    assert bits / size < 0.8 * 8 * len(packed) / size


def test_its_card_states_what_was_measured() -> None:
    card = (DEMO / "README.md").read_text()
    model, xz = (float(re.search(rf"\| {name}[^|]*\| (\d\.\d+) \|", card)[1]) for name in ("demo model", "`xz -9e`"))  # type: ignore[index]
    assert model < xz
    assert (DEMO / "LICENSE-PSF.txt").stat().st_size > 1000
    assert not re.search(r"to be measured|not trained", card)


def test_every_file_that_the_package_needs_is_packaged() -> None:
    patterns = {".json", ".jinja", ".safetensors", ".txt", ".md", ".py"}
    assert {path.suffix for path in DEMO.iterdir() if path.is_file()} <= patterns
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert all(f'"*{suffix}"' in pyproject for suffix in patterns - {".py"})
