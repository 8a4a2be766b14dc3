"""What a model's files say of its embeddings."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from nanoengine.errors import UnsupportedModel
from nanoengine.features.pooling.files import PoolingDefaults, defaults_of_folder, defaults_of_gguf

QWEN3 = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]
DENSE = {"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"}
LAST = {"word_embedding_dimension": 1024, "pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}
MEAN = {"pooling_mode_mean_tokens": True, "include_prompt": True}


def write(folder: Path, modules: Any, pooling: Any) -> Path:
    (folder / "1_Pooling").mkdir()
    (folder / "modules.json").write_text(modules if isinstance(modules, str) else json.dumps(modules))
    (folder / "1_Pooling" / "config.json").write_text(pooling if isinstance(pooling, str) else json.dumps(pooling))
    return folder


@pytest.mark.parametrize(
    ("modules", "pooling", "made"),
    [
        (QWEN3, LAST, PoolingDefaults("last", True)),
        ("\ufeff" + json.dumps(QWEN3), LAST, PoolingDefaults("last", True)),
        (QWEN3[:2], LAST, PoolingDefaults("last", False)),
        (QWEN3, MEAN, PoolingDefaults("mean", True)),
        (QWEN3, {"pooling_mode_cls_token": True}, PoolingDefaults(None, True)),
        (QWEN3, LAST | MEAN, PoolingDefaults(None, True)),  # one behind the other
        (QWEN3, {}, PoolingDefaults(None, True)),
        (QWEN3, {"embedding_dimension": 1024, "pooling_mode": "lasttoken"}, PoolingDefaults("last", True)),
        (QWEN3[:2], {"pooling_mode": "mean"}, PoolingDefaults("mean", False)),
        (QWEN3, {"pooling_mode": "cls"}, PoolingDefaults(None, True)),
        (QWEN3, {"pooling_mode": ["mean", "cls"]}, PoolingDefaults(None, True)),
        ([*QWEN3, DENSE], LAST, PoolingDefaults(None, True)),
        (QWEN3[:1], LAST, PoolingDefaults(None, False)),
    ],
    ids=str,
)
def test_a_folder_says_how(tmp_path: Path, modules: Any, pooling: Any, made: PoolingDefaults) -> None:
    assert defaults_of_folder(write(tmp_path, modules, pooling)) == made


def test_a_folder_that_says_nothing_is_of_the_last_token(tmp_path: Path) -> None:
    assert defaults_of_folder(tmp_path) == PoolingDefaults("last", True)


@pytest.mark.parametrize(
    ("modules", "pooling"),
    [("{", LAST), ({}, LAST), ([1], LAST), ([{"path": "a"}], LAST), (QWEN3, "[]"), (QWEN3, "}"), (QWEN3, "\xff" * (1 << 20))],
    ids=lambda own: str(own)[:20],
)  # fmt: skip
def test_a_broken_file_is_named(tmp_path: Path, modules: Any, pooling: Any) -> None:
    with pytest.raises(UnsupportedModel, match="json"):
        defaults_of_folder(write(tmp_path, modules, pooling))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    folder = write(tmp_path, QWEN3, LAST)
    (folder / "1_Pooling" / "config.json").unlink()
    os.mkfifo(folder / "1_Pooling" / "config.json")
    with pytest.raises(UnsupportedModel, match="regular file"):
        defaults_of_folder(folder)


@pytest.mark.parametrize(
    ("number", "pooling"), [(None, "last"), (0, "last"), (1, "mean"), (2, None), (3, "last"), (4, None)]
)
def test_a_gguf_file_says_how(number: int | None, pooling: str | None) -> None:
    own = {} if number is None else {"qwen3.pooling_type": number}
    assert defaults_of_gguf({"general.architecture": "qwen3", "llama.pooling_type": 1, **own}) == PoolingDefaults(
        pooling, True
    )
