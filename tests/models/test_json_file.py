"""The JSON files of a model: what cannot be read is a named error."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoengine.errors import ModelNotFound, UnsupportedModel
from nanoengine.models.json_file import read_json


def write(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)


def test_a_table_is_read(tmp_path: Path) -> None:
    write(tmp_path, '{"name": "größer", "sizes": [1, 2]}'.encode())
    assert read_json(tmp_path, "config.json") == {"name": "größer", "sizes": [1, 2]}


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json is missing"):
        read_json(tmp_path, "config.json")


@pytest.mark.parametrize("content", [b"{", b"", b"not json", b"\xff\xfe\xfa"])
def test_what_is_no_json_is_named(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, content)
    with pytest.raises(UnsupportedModel, match=r"config\.json is not valid JSON"):
        read_json(tmp_path, "config.json")


def test_tables_too_deep_for_any_model_are_named(tmp_path: Path) -> None:
    write(tmp_path, b'{"a":' * 100_000)
    with pytest.raises(UnsupportedModel, match="too deep"):
        read_json(tmp_path, "config.json")


@pytest.mark.parametrize("content", [b"[]", b'"text"', b"3", b"null"])
def test_what_is_no_table_is_named(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, content)
    with pytest.raises(UnsupportedModel, match=r"config\.json must hold a JSON table"):
        read_json(tmp_path, "config.json")
