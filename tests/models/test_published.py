"""Configs that were published, as they stand in public repositories: each is read by a family, or no family has it, or it is
refused for the reason beside it. Tables for pictures and sound are left out; long lists of modules are cut.
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from nanoengine.core.tokenizer import end_token_ids
from nanoengine.errors import UnsupportedModel
from nanoengine.models import config_fields
from nanoengine.models.architectures import ARCHITECTURES, UnsupportedArchitecture, read_model_config, text_table
from nanoengine.models.config_fields import NAMES_FILE
from nanoengine.models.description import config_table
from nanoengine.models.gguf.file import GGUFFile
from nanoengine.models.gguf.header import TensorRecord
from nanoengine.models.gguf.tensor_names import EMBEDDING
from nanoengine.models.gguf.translate import hf_config
from tests.models.configs import FOLDER, PUBLISHED
from tests.models.field_names import names_read
from tests.models.test_families import compare

FILES = json.loads((FOLDER / "gguf.json").read_text())


@pytest.mark.parametrize("published", PUBLISHED, ids=[published["model"] for published in PUBLISHED])
def test_a_published_config_means_what_it_means_to_transformers_or_is_refused_for_the_reason_beside_it(
    published: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published["config"]))
    table = config_table(tmp_path)
    text = text_table(table)
    config_fields._log_once.cache_clear()
    if not set(text.get("architectures", ARCHITECTURES)) & ARCHITECTURES.keys():
        with pytest.raises(UnsupportedArchitecture):
            read_model_config(table)
        return
    if "refused" in published:
        with pytest.raises(UnsupportedModel, match=re.escape(published["refused"])):
            read_model_config(table)
        return
    config = read_model_config(table)
    whole = transformers.AutoConfig.for_model(**copy.deepcopy(published["config"]))
    theirs = whole.get_text_config()
    theirs.tie_word_embeddings = whole.tie_word_embeddings
    compare(config, theirs)
    assert config.max_position_embeddings == theirs.max_position_embeddings
    assert re.findall(r"'(\w+)' \(", caplog.text) == published.get("left_out", [])
    ends = end_token_ids(
        config.vocab_size, text.get("eos_token_id"), published.get("generation", {}).get("eos_token_id")
    )
    assert all(end < config.vocab_size for end in ends)


@pytest.mark.parametrize("published", FILES, ids=[published["model"] for published in FILES])
def test_the_keys_of_a_published_gguf_file_are_read(published: dict[str, Any]) -> None:
    keys = published["keys"]
    embedding = TensorRecord(EMBEDDING, "F16", tuple(published["embedding"]), 0, 0, 0)
    config = read_model_config(hf_config(GGUFFile(Path("m.gguf"), keys, {EMBEDDING: embedding}, [])))
    prefix = keys["general.architecture"]
    assert [config.vocab_size, config.hidden_size] == published["embedding"]
    assert (config.num_layers, config.num_heads) == (
        keys[f"{prefix}.block_count"],
        keys[f"{prefix}.attention.head_count"],
    )


def test_the_names_that_others_read_are_those_of_the_installed_packages() -> None:
    """Made anew by `python -m tests.models.field_names`."""
    written = json.loads(NAMES_FILE.read_text())
    if any(importlib.metadata.version(package) != version for package, version in written["versions"].items()):
        pytest.skip(f"the names are those of {written['versions']}")
    assert names_read() == written
