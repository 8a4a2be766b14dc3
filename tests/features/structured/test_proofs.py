"""The programs of benchmarks/proofs, on data of a few lines: what they call accepted, and what fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.proofs import maskbench, schema_suite
from benchmarks.proofs.acceptance import Acceptance

POINT = {
    "properties": {"at": {"$ref": "#/$defs/at"}, "name": {"type": "string"}},
    "$defs": {"at": {"properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}}},
}


@pytest.fixture(scope="module")
def acceptance() -> Acceptance:
    return Acceptance("demo")


def test_a_text_is_refused_where_it_goes_wrong(acceptance: Acceptance) -> None:
    outputs = acceptance.outputs({"enum": ["a28037", "b", "é"]})
    texts = {'"a28037"': None, '"b"': None, '"é"': None, '"a2803': 6, '"c"': 1, '"b" ': 3, "": 0}
    assert {text: acceptance.refused_at(outputs, text) for text in texts} == texts
    assert acceptance.num_respelled == 1, "the tokenizer writes 37 as one token"
    assert len(acceptance.mask_us) > len(texts)


def maskbench_folder(folder: Path, valid: bool) -> Path:
    data = folder / "maskbench" / "data"
    data.mkdir(parents=True)
    tests = [{"valid": valid, "data": {"name": "n", "at": {"x": 1}}}, {"valid": False, "data": {"at": 1}}]
    (data / "a.json").write_text(json.dumps({"schema": {"type": ["object"]} | POINT, "tests": tests[:1]}))
    (data / "b.json").write_text(json.dumps({"schema": {"not": {}}, "tests": tests}))
    return folder


@pytest.mark.parametrize("valid", [True, False])
def test_maskbench_fails_for_an_invalid_instance_that_is_accepted(
    valid: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["maskbench", str(maskbench_folder(tmp_path, valid)), "--schemas", "0"])
    assert maskbench.main() == (0 if valid else 1)
    shown = capsys.readouterr().out
    assert f"     1 {'valid' if valid else 'invalid'} (in the schema's order only), accepted" in shown
    assert '     1 Unimplemented keys: ["not"]' in shown


def test_a_false_accept_is_declared_or_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tests" / "draft2020-12"
    folder.mkdir(parents=True)
    tests = [
        {"description": "leap", "data": "2021-02-29", "valid": False},
        {"description": "two", "data": "2", "valid": False},
    ]
    groups = [{"description": "dates", "schema": {"type": "string", "format": "date"}, "tests": tests}]
    (folder / "dates.json").write_text(json.dumps(groups))
    declared = tmp_path / "declared.txt"
    monkeypatch.setattr(schema_suite, "DECLARED", declared)
    declared.write_text("")
    for words, code in (([], 1), (["--declare"], 0), ([], 0)):
        monkeypatch.setattr("sys.argv", ["schema_suite", str(tmp_path), *words])
        assert schema_suite.main() == code
    assert declared.read_text() == "dates.json | dates | leap\n"
    declared.write_text(declared.read_text() + "dates.json | dates | two\n")
    assert schema_suite.main() == 1, "what is declared must happen"
