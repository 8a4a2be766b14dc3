"""Which models there are: of the command line, of a folder, of tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoengine.errors import InvalidConfig, UnknownOption
from nanoengine.serve.front import catalogue as module
from nanoengine.serve.front.catalogue import catalogue


def test_models_have_the_names_that_one_alone_has(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    found = catalogue(["demo", str(tmp_path / "a.gguf"), "org/name"], None, {}, {"max_model_len": 64})
    assert {name: source.model for name, source in found.items()} == {
        "demo": "demo",
        "a.gguf": str(tmp_path / "a.gguf"),
        "org/name": "org/name",
    }
    assert found["demo"].options == {"max_model_len": 64}


def test_a_folder_has_its_files_and_folders_of_models(tmp_path: Path) -> None:
    for name in ("one.gguf", "deep/er/two-00001-of-00002.gguf", "deep/er/two-00002-of-00002.gguf", "three/config.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "four.gguf").touch()
    (tmp_path / "circle").symlink_to(tmp_path)
    found = catalogue([], str(tmp_path), {}, {})
    assert {name: source.model for name, source in found.items()} == {
        "one.gguf": str(tmp_path / "one.gguf"),
        "two-00001-of-00002.gguf": str(tmp_path / "deep/er/two-00001-of-00002.gguf"),
        "three": str(tmp_path / "three"),
    }


def test_a_table_names_a_model_and_has_its_options() -> None:
    tables = {"small": {"model": "demo", "max_model_len": 32}, "demo": {"dtype": "float32"}}
    found = catalogue(["demo"], None, tables, {"max_model_len": 64})
    assert (found["small"].model, found["small"].options) == ("demo", {"max_model_len": 32})
    assert (found["demo"].model, found["demo"].options) == ("demo", {"max_model_len": 64, "dtype": "float32"})


def test_adapters_are_names_too() -> None:
    options = {"enable_lora": True, "lora_modules": ["poet=/folder"]}
    assert catalogue([], None, {"demo": options}, {})["demo"].adapters == ["poet"]
    with pytest.raises(InvalidConfig, match="two models or adapters have the name 'poet'"):
        catalogue([], None, {"demo": options, "poet": {"model": "demo"}}, {})


def test_what_cannot_be_served_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for models, folder, tables, message in (
        (["demo", "demo"], None, {}, "two models have the name 'demo'"),
        (["demo"], None, {"demo": {"model": "other"}}, "two models have the name 'demo'"),
        ([], str(tmp_path), {}, "has no model"),
        ([], str(tmp_path / "nothing"), {}, "it must be a folder"),
        ([], None, {" x": {"model": "demo"}}, "a model has the name"),
        ([], None, {"x" * 300: {"model": "demo"}}, "a model has the name"),
    ):
        with pytest.raises(InvalidConfig, match=message):
            catalogue(models, folder, tables, {})
    with pytest.raises(UnknownOption):
        catalogue(["demo"], None, {"demo": {"no_option": 1}}, {})
    with pytest.raises(InvalidConfig, match="max_model_len"):
        catalogue(["demo"], None, {}, {"max_model_len": 0})
    monkeypatch.setattr(module, "MAX_MODELS", 1)
    with pytest.raises(InvalidConfig, match="at most 1"):
        catalogue(["demo", "smollm2"], None, {}, {})
    monkeypatch.setattr(module, "MAX_FOLDERS", 1)
    (tmp_path / "deep").mkdir()
    with pytest.raises(InvalidConfig, match="more than 1 folders"):
        catalogue([], str(tmp_path), {}, {})
