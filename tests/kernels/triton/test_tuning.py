"""What was measured once is found by the next start; anything else is the defaults."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import torch

from nanoengine.kernels.triton import tuning as module
from nanoengine.kernels.triton.tuning import DEFAULTS, DEPENDENT, Tuning, file_for, file_name, load_tuning

NAME, OTHER = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
SECOND = torch.device("cuda", 1)
"""Not the current one."""


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NANOENGINE_TUNING", str(tmp_path))
    monkeypatch.setattr(module, "MEASURED", tmp_path / "of the package")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: OTHER if device == SECOND else NAME)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0) if device == SECOND else (9, 0))


def test_what_is_saved_is_found_again() -> None:
    assert load_tuning() == DEPENDENT
    chosen = replace(DEFAULTS, decode_tile=64, dependent_launch=1)
    assert chosen.save(NAME) == file_for(NAME)
    assert load_tuning() == chosen
    replace(chosen, decode_tile=16).save("another GPU")
    assert load_tuning() == chosen


@pytest.mark.parametrize(
    "text",
    ["", "[" * 20_000, "[]", "{}", "7", json.dumps({"decode_tile": 64}), '{"decode_tile": "64"}', '{"other": 1}'],
)
def test_a_file_of_another_version_is_the_defaults(text: str, caplog: pytest.LogCaptureFixture) -> None:
    file_for(NAME).write_text(text)
    with caplog.at_level(logging.WARNING):
        assert load_tuning() == DEPENDENT
    assert "is left out" in caplog.text


def test_without_a_gpu_there_are_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    replace(DEFAULTS, decode_tile=64).save(NAME)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert load_tuning() == DEFAULTS


def test_an_older_gpu_has_no_dependent_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = replace(DEFAULTS, decode_tile=64, dependent_launch=1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert load_tuning() == DEFAULTS
    chosen.save(NAME)
    assert load_tuning() == replace(chosen, dependent_launch=0)


def test_each_gpu_has_the_choice_for_its_kind() -> None:
    replace(DEFAULTS, decode_tile=64).save(OTHER)
    assert load_tuning(torch.device("cuda", 0)) == DEPENDENT
    assert load_tuning(SECOND).decode_tile == 64
    assert load_tuning(torch.device("cpu")) == DEFAULTS


def test_choices_of_the_package_are_of_this_version() -> None:
    for path in (Path(module.__file__).parent / "measured").glob("*.json"):
        assert set(json.loads(path.read_text())) == {field.name for field in fields(Tuning)}, path.name


def test_a_choice_comes_with_the_package_and_gives_way_to_one_made_here() -> None:
    def save(folder: Path, tuning: Tuning) -> None:
        folder.mkdir(exist_ok=True)
        (folder / file_name(NAME)).write_text(json.dumps(asdict(tuning)))

    theirs, ours = (replace(DEFAULTS, decode_tile=tile) for tile in (16, 64))
    save(module.MEASURED, theirs)
    assert load_tuning() == theirs
    save(file_for(NAME).parent, ours)
    assert load_tuning() == ours
    file_for(NAME).write_text("{}")
    assert load_tuning() == theirs, "one of another version hides none"
