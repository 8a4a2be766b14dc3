"""The text of a model that sees pictures, where a family here has its name and does not compute its text: Mistral 4."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from benchmarks.architectures.checkpoints import make
from nanoengine import LLM, SamplingParams


def test_mistral_4_is_computed_as_its_text_alone(tmp_path: Path) -> None:
    make("Mistral4ForCausalLM", tmp_path / "text")
    shutil.copytree(tmp_path / "text", tmp_path / "whole")
    table = json.loads((tmp_path / "text" / "config.json").read_text())
    inner = {name: value for name, value in table.items() if name not in ("architectures", "transformers_version")}
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": inner}
    whole |= {"tie_word_embeddings": table.get("tie_word_embeddings", False), "dtype": "float32"}
    (tmp_path / "whole" / "config.json").write_text(json.dumps(whole))
    tensors = load_file(tmp_path / "text" / "model.safetensors")
    save_file(
        {f"language_model.{name}": own for name, own in tensors.items()}, tmp_path / "whole" / "model.safetensors"
    )
    said = []
    for name in ("text", "whole"):
        options = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 50, "max_model_len": 128}
        with LLM(str(tmp_path / name), use_tqdm=False, **options) as llm:
            [output] = llm.generate([[1, 2, 3, 4, 5]], SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
            said.append(output.outputs[0].token_ids)
    assert said[0] == said[1]
