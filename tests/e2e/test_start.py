"""What a start does not wait for: packages that take a second to import, and that no model of a family of this package needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forks import IS_LINUX, run_forked
from tests.models.families import family_checkpoint
from tests.models.gguf.written import tiny_model, write_gguf
from tests.models.gguf.written_hybrids import write_hybrid

LOAD = """
import json, sys
from nanoengine import LLM, SamplingParams
for model, tokenizer in json.loads(sys.argv[1]):
    with LLM(model, tokenizer=tokenizer, device="cpu", num_kv_blocks=40, use_tqdm=False) as llm:
        llm.generate([[3, 4, 5]], SamplingParams(max_tokens=2), use_tqdm=False)
    print(model, sorted({"torch._dynamo", "sympy", "transformers", "triton"} & set(sys.modules)))
"""


@pytest.mark.skipif(not IS_LINUX, reason="Python is forked on Linux alone")
def test_no_load_imports_what_takes_a_second(tmp_path: Path) -> None:
    """The bundled model, folders, and GGUF files whose tensors are changed as they are read."""
    folder = str(family_checkpoint(tmp_path / "folder", "Falcon H1"))
    hybrid = str(write_hybrid(Path(folder), tmp_path / "hybrid.gguf"))
    gemma = str(write_gguf(*tiny_model("gemma3_text", tmp_path / "gemma"), tmp_path / "gemma.gguf"))
    models = [("demo", None), (folder, None), (hybrid, folder), (gemma, folder)]
    result = run_forked(["-c", LOAD, json.dumps(models)])
    assert result.stdout.splitlines() == [f"{model} []" for model, _ in models], result.stdout + result.stderr
