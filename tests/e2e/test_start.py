"""What a start does not wait for: packages that take a second to import, and that no model of a family of this package needs; and
what it does wait for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanoengine import LLM
from nanoengine.errors import UnsupportedModel
from tests.forks import IS_LINUX, run_forked
from tests.models.families import family_checkpoint
from tests.models.gguf.test_tokenizer import bpe, sentencepiece
from tests.models.gguf.written import write_file, write_gguf

LOAD = """
import json, sys
from nanoengine import LLM, SamplingParams
for model, tokenizer in json.loads(sys.argv[1]):
    with LLM(model, tokenizer=tokenizer, device="cpu", num_kv_blocks=40, use_tqdm=False) as llm:
        llm.generate([[3, 4, 5]], SamplingParams(max_tokens=2), use_tqdm=False)
    print(model, sorted({"torch._dynamo", "sympy", "transformers", "triton"} & set(sys.modules)))
"""


def write_vocabulary(metadata: Mapping[str, Any], folder: Path) -> Path:
    keys = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in metadata.items()}
    return write_file(folder / "vocabulary.gguf", "llama", keys, {})


@pytest.mark.skipif(not IS_LINUX, reason="Python is forked on Linux alone")
def test_no_load_imports_what_takes_a_second(tmp_path: Path) -> None:
    """The bundled model, folders, and GGUF files whose tensors are changed as they are read."""
    folder = str(family_checkpoint(tmp_path / "folder", "Falcon H1"))
    hybrid = str(write_gguf(Path(folder), tmp_path / "hybrid.gguf"))
    gemma = str(
        write_gguf(family_checkpoint(tmp_path / "gemma", "Gemma3", query_pre_attn_scalar=32), tmp_path / "gemma.gguf")
    )
    models = [
        ("demo", None),
        (folder, None),
        (hybrid, folder),
        (gemma, str(write_vocabulary(sentencepiece(), tmp_path))),
    ]
    result = run_forked(["-c", LOAD, json.dumps(models)])
    assert result.stdout.splitlines() == [f"{model} []" for model, _ in models], result.stdout + result.stderr


def test_a_start_ends_with_the_error_of_a_tokenizer_that_is_built_beside_the_weights(tmp_path: Path) -> None:
    model = write_gguf(family_checkpoint(tmp_path, "Gemma3", query_pre_attn_scalar=32), tmp_path / "gemma.gguf")
    vocabulary = write_vocabulary(bpe(**{"tokenizer.ggml.merges": ["a \u4f60"]}), tmp_path)
    with pytest.raises(UnsupportedModel, match="merges do not fit"):
        LLM(str(model), tokenizer=str(vocabulary), device="cpu", num_kv_blocks=40, use_tqdm=False)
