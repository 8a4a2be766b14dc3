"""What is shown of start-up."""

from __future__ import annotations

import io
import sys

import pytest
import tqdm.auto

from nanoengine.llm import _bar
from nanoengine.progress import stage


@pytest.mark.usefixtures("terminal")
def test_a_stage_shows_its_name_and_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with stage("Loading weights", 2, "tensor", shown=True) as advance:
        assert "Loading weights:   0%" in capsys.readouterr().err
        advance()
        advance()
    left = capsys.readouterr().err
    assert left.endswith("\r"), "the line is empty again"


@pytest.mark.usefixtures("terminal")
def test_a_stage_without_parts_is_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    with stage("Compiling kernels", shown=True):
        assert capsys.readouterr().err.strip() == "Compiling kernels ..."


def test_a_notebook_has_the_bars_on_its_page(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Its standard error is no terminal, but a stream of ipykernel. tqdm.auto chooses how bars are drawn there."""
    caplog.set_level("INFO", "nanoengine")
    stream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    monkeypatch.setattr(sys, "stderr", stream)
    chosen: list[type] = []
    monkeypatch.setattr(
        tqdm.auto, "tqdm", type("Widget", (tqdm.std.tqdm,), {"display": lambda own, **_: chosen.append(own)})
    )
    with stage("Loading weights", 2, shown=True), stage("Compiling kernels", shown=True), _bar(3, True) as bar:
        assert [own.desc for own in chosen] == ["Loading weights", "Compiling kernels", "Generating"]
        assert bar.total == 3
    with stage("Loading weights", 2, shown=False), _bar(3, False) as bar:
        assert bar.disable
    assert caplog.messages == []


def test_a_log_gets_no_bars(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """And one line for what has no parts, and may take long."""
    caplog.set_level("INFO", "nanoengine")
    with stage("Loading weights", 2, shown=True) as advance, stage("Compiling kernels", shown=True):
        advance()
    assert capsys.readouterr().err == ""
    assert caplog.messages == ["Compiling kernels ..."]


@pytest.mark.usefixtures("terminal")
def test_nothing_is_shown_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    with stage("Loading weights", 2, shown=False) as advance, stage("Compiling kernels", shown=False):
        advance()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("has_one", [False, True])
def test_without_standard_error_nothing_is_shown(monkeypatch: pytest.MonkeyPatch, has_one: bool) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed if has_one else None)
    with stage("Loading weights", 2, shown=True) as advance, stage("Compiling kernels", shown=True):
        advance()
