"""A tokenizer.json that makes its library panic, or takes too much, is refused before a server opens."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from nanoengine.errors import InvalidPrompt, UnsupportedModel
from nanoengine.models.names import DEMO
from nanoengine.models.tokenizer import HFTokenizer
from nanoengine.models.tokenizer_trial import try_tokenizer
from nanoengine.serve.server.config import ServerConfig
from nanoengine.serve.server.serve import open_serving
from tests.models.damages import PANICS, TOKENIZER, change, make_pipe


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(DEMO, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors", "*.py"))
    return tmp_path / "model"


@pytest.mark.parametrize("what", PANICS)
def test_one_that_panics_is_refused_by_name_or_ends_one_text_alone(folder: Path, what: str) -> None:
    change(TOKENIZER, **PANICS[what])(folder)
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json is no tokenizer that can be used: (the lib|it takes)"):
        open_serving(str(folder), {"device": "cpu"}, ServerConfig())
    try:  # without a trial
        tokenizer = HFTokenizer(folder)
    except UnsupportedModel as error:
        refused = str(error)
        assert "panics" in refused
    else:
        with pytest.raises(InvalidPrompt, match="panics"):
            tokenizer.encode("a" * 60 + "!")


def test_one_that_takes_too_much_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoengine.models.tokenizer_trial.MAX_WAIT", 1e-3)
    with pytest.raises(UnsupportedModel, match=r"it is not read after 0\.001 s"):
        try_tokenizer(folder)


def test_a_sound_one_and_what_is_none_are_left_to_their_reader(folder: Path) -> None:
    try_tokenizer(folder)
    try_tokenizer(folder / "config.json")  # a file, as GGUF's are
    (folder / TOKENIZER).write_text("{")
    try_tokenizer(folder)
    make_pipe(TOKENIZER)(folder)
    try_tokenizer(folder)
