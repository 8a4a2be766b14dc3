"""What the files of a model say of it is read without torch, and every token that any of them calls an end is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanoengine import SamplingParams
from nanoengine.models.description import describe
from nanoengine.models.names import DEMO
from tests.support import tiny_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), eos_token_id=[7, 9, 300])


def test_a_folder_is_described_by_its_tables(tiny: Path) -> None:
    (tiny / "generation_config.json").write_text(json.dumps({"eos_token_id": 11}))
    description = describe(tiny)
    assert description.config.architecture == "Qwen3ForCausalLM"
    assert description.eos_token_ids == [7, 9, 11, 256], "300 is beyond the vocabulary"
    assert description.tokenizer.decode(description.tokenizer.encode("some text")) == "some text"


@pytest.mark.parametrize(
    "work",
    [
        "from nanoengine.models.description import describe; from nanoengine.models.names import DEMO;"
        "describe(DEMO).tokenizer.render_chat([{'role': 'user', 'content': 'hello'}])",
        "from nanoengine.serve.cli import main; main(['models']); assert main(['generate', '--model', '/no/folder', 'hi']) == 1",
    ],
)
def test_neither_it_nor_lists_of_models_nor_wrong_names_need_torch(work: str, tmp_path: Path) -> None:
    """It takes seconds to import, for an error that takes none."""
    code = f"import sys; {work}; print({{'torch', 'transformers'}} & set(sys.modules))"
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert result.stdout.splitlines()[-1] == "set()"
    assert ("ModelNotFound" in result.stderr) == ("generate" in work)


def advice(tiny: Path, **generation: object) -> object:
    (tiny / "generation_config.json").write_text(json.dumps({"eos_token_id": 11, **generation}))
    return describe(tiny).advised_sampling


def test_what_the_makers_advise_is_how_requests_are_sampled(tiny: Path) -> None:
    found = advice(tiny, temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.05, do_sample=True)
    assert found == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05}
    assert SamplingParams(**found).top_k == 20  # type: ignore[arg-type]
    assert advice(tiny, max_new_tokens=128) == {"max_tokens": 128}
    assert advice(tiny) == {}


def test_what_is_null_or_in_no_file_is_no_advice(tiny: Path) -> None:
    assert advice(tiny, temperature=None, top_p=0.9) == {"top_p": 0.9}
    (tiny / "generation_config.json").unlink()
    assert describe(tiny).advised_sampling == describe(DEMO).advised_sampling == {}
