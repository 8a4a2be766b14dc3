"""The `nanoengine` command, run as a user would."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nanoengine
from nanoengine import LLM, LoRARequest, SamplingParams
from nanoengine.serve.cli import main
from tests.features.lora.written import linear_layers, write_adapter
from tests.models.families import family_checkpoint


def test_demo_completes_code_and_shows_the_prefix_cache(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--max-model-len", "64", "--dtype", "float32"]) == 0
    shown = capsys.readouterr().out
    assert "def binary_search(" in shown
    assert "from the prefix cache" in shown


def test_generate_streams_one_prompt(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may come on standard input."""
    arguments = ["generate", "--model", str(tiny), "--max-tokens", "5", "--seed", "1"]
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    texts = []
    for prompt in (["hello"], ["hello"], []):
        assert main([*arguments, *prompt]) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1
    assert len(texts[0]) > 1
    assert texts[0].endswith("\n")


def test_generate_takes_several_prompts_a_policy_and_penalties(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    penalties = ["--presence-penalty", "0.5", "--frequency-penalty", "0.5", "--repetition-penalty", "1.2"]
    options = ["--model", str(tiny), "--max-tokens", "3", "--scheduling-policy", "mixed", *penalties]
    assert main(["generate", *options, "-n", "2", "one", "two"]) == 0
    shown = capsys.readouterr().out
    assert [shown.count(f"--- {prompt!r}") for prompt in ("one", "two")] == [2, 2]


def test_generate_holds_its_text_to_a_schema_an_expression_or_a_choice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one prompt, which is streamed, and of several."""
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"enum": ["é", 2]}, "minItems": 3, "maxItems": 3}', "utf-8-sig")
    for prompts, options, text in (
        (["one"], ["--json-schema", str(schema)], r'\[("é"|2)(, ("é"|2)){2}\]'),
        (["one", "two"], ["--regex", "[0-9]{3}-[a-c]{4}"], "[0-9]{3}-[a-c]{4}"),
        (["one"], ["--choice", "red", "--choice", "green"], "red|green"),
    ):
        assert main(["generate", "--dtype", "float32", "--seed", "1", *options, "--", *prompts]) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("--- ")]
        assert len(lines) == len(prompts)
        assert all(re.fullmatch(text, line) for line in lines), lines


def test_an_adapter_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = family_checkpoint(tmp_path / "model", "Llama", seed=5, head_dim=32)
    adapter = write_adapter(tmp_path / "adapter", linear_layers(model), size=1.0)
    texts = []
    for options in ([], ["--adapter", str(adapter)]):
        command = ["generate", "--model", str(model), "--dtype", "float32", "--temperature", "0", "--max-tokens", "5"]
        assert main([*command, "one", "--num-kv-blocks", "20", *options, "two"]) == 0
        texts.append(capsys.readouterr().out)
    with LLM(str(model), dtype="float32", num_kv_blocks=20, enable_lora=True) as llm:
        requests = LoRARequest("poet", lora_path=str(adapter))
        outputs = llm.generate(["one", "two"], SamplingParams(temperature=0, max_tokens=5), lora_request=requests)
    assert texts[1] == "".join(f"--- {each.prompt!r} [0] (length)\n{each.outputs[0].text}\n" for each in outputs)
    assert texts[0] != texts[1]


def test_show_has_the_line_of_one_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "demo"]) == 0
    names, values = capsys.readouterr().out.splitlines()
    assert names.startswith("model ")
    assert values.startswith("demo ")
    assert values.endswith("yes")


def test_fetch_says_where_the_model_is_and_what_to_do_with_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanoengine.serve.cli.fetch_model", lambda name: tmp_path / f"{name}.gguf")
    assert main(["fetch", "smollm2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        str(tmp_path / "smollm2.gguf"),
        "Talk with it: nanoengine chat smollm2",
    ]
    assert main(["fetch", "gemma-3-270m"]) == 0
    assert "goes on with texts: nanoengine generate --model gemma-3-270m" in capsys.readouterr().out


def test_commands_that_take_no_parameters_work_where_sampling_was_deleted(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "sampling")
    shutil.copytree(Path(nanoengine.__file__).parent, tmp_path / "nanoengine", ignore=ignored)
    code = (
        "import sys; sys.meta_path[:] = [own for own in sys.meta_path if 'Editable' not in repr(own)]\n"
        "from nanoengine.serve.cli import main; print([main(['models']), main(['fetch', 'no-such']), main(['generate', 'x'])])"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[0, 1, 1]"
    fetching, generating = done.stderr.splitlines()[-2:]
    assert fetching.startswith("nanoengine: ModelNotFound: 'no-such' cannot be fetched")
    assert generating.startswith("nanoengine: InvalidConfig: sampling is not installed")
