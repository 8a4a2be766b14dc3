"""A pytest plugin: modules `vllm.*` and `tests.*` as far as vLLM's tests of a server need them, so that vLLM is not installed.

Its tests ask a server over HTTP and import little of vLLM: a tokenizer to compare with, the size of a vocabulary, and classes
that only its unit tests use, which exclusions.txt leaves out. The server that they start is nanoengine's with $MODEL, under
the name of the model that they ask for.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import anthropic
import launch
import openai
import pytest
import vllm_embeddings


@functools.cache
def get_tokenizer(tokenizer_name: str = "") -> Any:
    """transformers' tokenizer of the model that is served, whatever it is called."""
    del tokenizer_name
    from transformers import AutoTokenizer

    file = Path(os.environ["MODEL_FILE"])
    return AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)


class ModelConfig:
    """Of vLLM's class, what its tests ask."""

    def __init__(self, **_: Any) -> None:
        pass

    def get_vocab_size(self) -> int:
        return len(get_tokenizer())


class RemoteOpenAIServer:
    """vLLM's way to start a server for tests, with nanoengine behind it."""

    DUMMY_API_KEY = "token-abc123"
    show_hidden_metrics = False

    def __init__(
        self,
        model: str,
        vllm_serve_args: Sequence[str],
        *,
        env_dict: dict[str, str] | None = None,
        **_: Any,
    ) -> None:
        options = [
            word
            for group in launch.split_options(vllm_serve_args)
            if group[0] not in ("--port", "--dtype")  # ours is free, and a GGUF file says how it is computed
            for word in group
        ]
        key = (env_dict or {}).get("VLLM_API_KEY")
        if key:
            options += ["--api-key", key]
        if "--served-model-name" not in options:
            options += ["--served-model-name", model]
        self._server = launch.Server(os.environ["MODEL"], options)
        self.url_root = self._server.url

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def get_client(self, **kwargs: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **kwargs)

    def get_async_client(self, **kwargs: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **kwargs)

    def get_async_client_anthropic(self, **kwargs: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.url_root, api_key=self.DUMMY_API_KEY, max_retries=0, **kwargs)


class NotHere:
    """Something of vLLM's that only excluded tests use."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pytest.fail("this test is of vLLM's own classes: it belongs into exclusions.txt")


def hf_api() -> Any:
    """A hub without files: adapters (LoRA) that tests would have are none here."""
    return SimpleNamespace(snapshot_download=lambda **_: launch.NO_ADAPTER)


KNOWN: dict[str, dict[str, Any]] = {
    "vllm": {"__version__": launch.version()},
    "vllm.config": {"ModelConfig": ModelConfig},
    "vllm.entrypoints.pooling.embed.protocol": {"EmbeddingResponse": vllm_embeddings.EmbeddingResponse},
    "vllm.envs": {"VLLM_USE_RUST_FRONTEND": False},
    "vllm.exceptions": {"VLLMValidationError": ValueError},
    "vllm.platforms": {"current_platform": SimpleNamespace(is_rocm=lambda: False)},
    "vllm.tokenizers": {
        "get_tokenizer": get_tokenizer,
        "AutoTokenizer": SimpleNamespace(from_pretrained=get_tokenizer),
    },
    "vllm.transformers_utils.repo_utils": {"hf_api": hf_api},
    "vllm.utils.network_utils": {"get_open_port": launch.free_port},
    "vllm.v1.engine.exceptions": {"EngineDeadError": RuntimeError},
    "vllm.version": {"__version__": launch.version(), "_prev_minor_version": lambda: "0.0"},
    "tests.utils": {"RemoteOpenAIServer": RemoteOpenAIServer, "ROCM_EXTRA_ARGS": []},
    "tests.conftest": {"LocalAssetServer": NotHere},
    "tests.models.language.pooling.embed_utils": {
        "float_embeddings": vllm_embeddings.float_embeddings,
        "run_embedding_correctness_test": vllm_embeddings.run_embedding_correctness_test,
    },
    "tests.models": {},
    "tests.models.language": {},
    "tests.models.language.pooling": {},
    "tests.models.utils": {"check_embeddings_close": vllm_embeddings.check_embeddings_close},
}


class StandIns(MetaPathFinder, Loader):
    """Finds every module of vLLM: those of KNOWN with what is there, and NotHere for any other name."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        del path, target
        if name.split(".")[0] == "vllm" or name in KNOWN:
            return ModuleSpec(name, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(KNOWN.get(module.__name__, {}))
        module.__dict__["__getattr__"] = functools.partial(_other, module.__name__)


def _other(module: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if f"{module}.{name}" in KNOWN:
        return importlib.import_module(f"{module}.{name}")
    return NotHere


sys.meta_path.insert(0, StandIns())


@pytest.fixture
def local_asset_server() -> None:
    """Images, for models that see: there is none."""


@pytest.fixture(scope="session", name="qwen3_lora_files")
def _qwen3_lora_files() -> str:
    return launch.NO_ADAPTER


@pytest.fixture(scope="session", name="hf_runner")
def _hf_runner() -> type:
    return vllm_embeddings.Reference
