"""A byte order mark, with which some editors begin a file, is no part of what the file says."""

from __future__ import annotations

import io
import json
from codecs import BOM_UTF8
from pathlib import Path

import pytest
from safetensors import safe_open

from nanoengine import LLM, SamplingParams
from nanoengine.features.pooling.files import defaults_of_folder
from nanoengine.serve import sampling_options
from nanoengine.serve.arguments import standard_input
from nanoengine.serve.command import read_options
from tests.scripted import folder_of

MARK = BOM_UTF8.decode()


def mark(path: Path) -> Path:
    path.write_bytes(BOM_UTF8 + path.read_bytes())
    return path


def test_of_the_files_of_a_model(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "qwen2.5")
    template = folder / "chat_template.jinja"
    assert template.exists()
    [weights] = folder.glob("*.safetensors")
    with safe_open(weights, framework="pt") as file:
        weight_map = dict.fromkeys(file.keys(), weights.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), "utf-8")

    def prompt_and_answer(chat_template: Path | str | None) -> tuple[str, str]:
        with LLM(str(folder), device="cpu", num_kv_blocks=20, chat_template=chat_template, use_tqdm=False) as llm:
            params = SamplingParams(temperature=0, max_tokens=3)
            [output] = llm.chat([{"role": "user", "content": "Hello"}], params, use_tqdm=False)
            prompt = llm.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
            return prompt, output.outputs[0].text

    expected = prompt_and_answer(None)
    assert expected[0].startswith("<|im_start|>")
    names = {mark(path).name for path in (*folder.glob("*.json"), template)}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json"} <= names
    for chat_template in (None, template, template.read_text("utf-8")):
        assert prompt_and_answer(chat_template) == expected


def test_of_what_says_how_embeddings_are_made(tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    modules = [{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    (tmp_path / "modules.json").write_text(MARK + json.dumps(modules), "utf-8")
    (tmp_path / "1_Pooling/config.json").write_text(MARK + json.dumps({"pooling_mode_mean_tokens": True}), "utf-8")
    assert defaults_of_folder(tmp_path).pooling == "mean"


def test_of_what_the_command_line_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "serve.toml").write_text(f"{MARK}port = 7", "utf-8")
    assert read_options(str(tmp_path / "serve.toml")) == {"port": 7}
    (tmp_path / "schema.json").write_text(f"{MARK}{{}}", "utf-8")
    assert sampling_options._schema_text(tmp_path / "schema.json") == "{}"
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{MARK}def f("))
    assert standard_input() == "def f("
