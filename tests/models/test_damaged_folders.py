"""No model folder is loaded before it was found sound, whatever was done to its files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from nanoengine.builder import build_engine, read_config
from nanoengine.core.startup import Startup
from nanoengine.errors import InvalidPrompt, ModelNotFound, NanoEngineError, UnsupportedModel
from nanoengine.models.capability import Models
from nanoengine.models.names import DEMO
from tests.models.damages import (
    CONFIG,
    DAMAGES,
    GENERATION,
    INDEX,
    ODD_BUT_SOUND,
    TOKENIZER,
    TOKENIZER_CONFIG,
    WEIGHTS,
    Damage,
    change,
    listed,
)


def described(model: Path = DEMO) -> Models:
    """What the files of a model say; nothing is loaded."""
    models = Models()
    Startup(read_config(str(model), {}), [models]).describe()
    return models


@pytest.fixture
def loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Startup, "load", lambda _: pytest.fail("memory was taken for it"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The bundled model with its weights behind a link, as in the cache of the hub."""
    copy = tmp_path / "model"
    copy.mkdir()
    for name in (CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG, "chat_template.jinja"):
        shutil.copy(DEMO / name, copy / name)
    (copy / WEIGHTS).symlink_to(DEMO / WEIGHTS)
    return copy


def test_a_folder_that_is_not_damaged_is_sound(folder: Path) -> None:
    assert described(folder).model_config == described().model_config


@pytest.mark.usefixtures("loads_nothing")
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_folder_is_a_named_error_and_never_loaded(folder: Path, damage: Damage) -> None:
    damage(folder)
    with pytest.raises(NanoEngineError) as raised:
        build_engine(read_config(str(folder), {}), use_tqdm=False)
    assert len(str(raised.value)) < 6000, "a message can be read"


@pytest.mark.parametrize("damage", ODD_BUT_SOUND.values(), ids=ODD_BUT_SOUND)
def test_an_odd_folder_gives_the_same_tokens_or_a_named_error(folder: Path, damage: Damage) -> None:
    damage(folder)
    try:
        tokenizer = described(folder).tokenizer
    except NanoEngineError:
        return
    assert tokenizer.encode("def f(x):") == described().tokenizer.encode("def f(x):")


def test_a_text_that_makes_the_library_panic_is_a_named_error(folder: Path) -> None:
    pattern = {"Regex": "(a+)+$"}
    change(TOKENIZER, pre_tokenizer={"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})(
        folder
    )
    tokenizer = described(folder).tokenizer
    assert tokenizer.encode("b")
    with pytest.raises(InvalidPrompt, match="panics"):
        tokenizer.encode("a" * 60 + "!")


LONG = "n" * 5000
NO_PATHS = ["/" + LONG, "/" + "n/" * 5000, "a/" + LONG, "nul\0", "/nul\0/model", "a/\0", "~\0"]
NO_PATHS += ["\ud800", "/\ud800", "x/\ud800"]


@pytest.mark.usefixtures("loads_nothing")
@pytest.mark.parametrize("path", NO_PATHS, ids=lambda path: ascii(path[:9]))
def test_what_cannot_be_a_path_is_no_model_and_no_tokenizer(path: str) -> None:
    with pytest.raises(ModelNotFound) as raised:
        build_engine(read_config(path, {}), use_tqdm=False)
    assert len(str(raised.value)) < 6000
    with pytest.raises(ModelNotFound):
        build_engine(read_config("demo", {"tokenizer": path}), use_tqdm=False)


@pytest.mark.usefixtures("loads_nothing")
@pytest.mark.parametrize("name", [CONFIG, GENERATION, INDEX, WEIGHTS])
def test_a_file_that_may_not_be_read_is_a_named_error(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def refuse(path: Path, *_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    if name == INDEX:
        listed(WEIGHTS)(folder)
    read_text = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path, **rest: (refuse if path.name == name else read_text)(path, **rest)
    )
    monkeypatch.setattr("nanoengine.core.weights.safe_open", refuse)
    with pytest.raises(NanoEngineError, match="cannot be read"):
        build_engine(read_config(str(folder), {}), use_tqdm=False)


def test_the_first_thing_that_is_wrong_is_told_with_its_value(folder: Path) -> None:
    change(CONFIG, vocab_size=10**11)(folder)
    with pytest.raises(UnsupportedModel, match=r"vocab_size is 100000000000 in .*at most 2147483647"):
        described(folder)
