"""What a request says nothing of: the advice of a model's makers, or what suits small models; the same at every door."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from nanoengine import LLM, SamplingParams
from nanoengine.builder import build_engine, read_config
from nanoengine.core.sampling_params import CoreSamplingParams
from nanoengine.models.default_sampling import SMALL_MODEL_DEFAULTS, default_sampling
from nanoengine.serve.server.bodies.params import sampling_params
from tests.serve.server.test_params import request


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "nanoengine")
    return caplog


def test_without_advice_a_small_model_is_sampled_as_suits_it() -> None:
    assert default_sampling({}, SamplingParams) == SMALL_MODEL_DEFAULTS
    assert SMALL_MODEL_DEFAULTS == {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


def test_advice_without_a_temperature_wins_where_it_says_something() -> None:
    advised = {"top_p": 0.5, "max_tokens": 9}
    assert default_sampling(advised, SamplingParams) == {**SMALL_MODEL_DEFAULTS, **advised}


def test_advice_with_a_temperature_stays_as_it_is() -> None:
    assert default_sampling({"temperature": 0.6}, SamplingParams) == {"temperature": 0.6}
    assert default_sampling({"temperature": 0}, SamplingParams) == {"temperature": 0}


@pytest.mark.parametrize("bad", [7.0, -1.0, float("nan"), 10**400, "0.6", True, [0.6], {"a": 1}], ids=repr)
def test_only_what_cannot_work_is_left_out_and_named(bad: object, warnings: pytest.LogCaptureFixture) -> None:
    good = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1, "max_tokens": 100}
    assert default_sampling(good, SamplingParams) == good
    assert not warnings.records
    assert default_sampling({"top_p": bad, **good, "min_p": bad}, SamplingParams) == good
    assert [text.split(" of ")[1].split()[0] for text in warnings.messages] == ["top_p", "min_p"]


def test_where_sampling_was_deleted_its_fields_are_no_advice() -> None:
    advised = {"temperature": 0.6, "repetition_penalty": 1.1}
    assert default_sampling(advised, CoreSamplingParams) == {"temperature": 0.6}


@pytest.mark.parametrize(
    ("advised", "expected"),
    [
        ({}, SMALL_MODEL_DEFAULTS),
        ({"temperature": 0.25, "top_k": 3, "top_p": "much"}, {"temperature": 0.25, "top_k": 3}),
    ],
    ids=["without advice", "with some"],
)
def test_every_door_agrees(
    advised: dict[str, Any], expected: dict[str, Any], tiny: Path, tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    (folder / "generation_config.json").write_text(json.dumps(advised))
    options = {"dtype": "float32", "device": "cpu", "num_kv_blocks": 40}
    with LLM(str(folder), use_tqdm=False, **options) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(**expected)
        [silent] = llm.make_requests([1, 2], None)
        assert silent.params == SamplingParams(**expected)
        [own] = llm.make_requests([1, 2], SamplingParams())
        assert own.params == SamplingParams()
        assert (own.params.temperature, own.params.top_k, own.params.top_p, own.params.min_p) == (1.0, 0, 1.0, 0.0)
    assert len([text for text in warnings.messages if "top_p" in text]) == ("top_p" in advised)
    built = build_engine(read_config(str(folder), options), use_tqdm=False)
    of_server = sampling_params(request(max_tokens=16), built.models.default_sampling, max_model_len=100, max_n=4)
    assert of_server == SamplingParams(**expected, max_tokens=16)
    built.engine.close()
