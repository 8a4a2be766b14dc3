"""A pytest plugin: llama.cpp's tests of its server, run against nanoengine's.

Their ServerProcess starts nanoengine with $MODEL instead, one process for each set of options that nanoengine has too. Requests
to llama.cpp's own paths are put into OpenAI's words on the way out, and the answers into llama.cpp's on the way in.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import launch
import pytest

OPENAI_PATHS = ("/chat/completions", "/completions", "/models", "/responses", "/embeddings")
LLAMA_ONLY = ("cache_prompt", "id_slot", "return_tokens")
"""Fields that say how llama.cpp is to keep its cache, or what it tells besides."""

DEMO_POSITIONS = 4096

running: dict[tuple[str, ...], launch.Server] = {}


def options_of(process: Any) -> tuple[str, ...]:
    """The options of `nanoengine serve` that mean what the test asks of llama.cpp's server."""
    slots = process.n_slots or 1
    options = ["--served-model-name", process.model_alias or "model"]
    # A few more names: their tests ask for models that are not there, and llama.cpp serves what it has.
    options += ["gpt-3.5-turbo-instruct", "gpt-3.5-turbo", "davinci-002", "gpt-4.1", "text-embedding-3-small", "test"]
    if (pooling := getattr(process, "pooling", None)) in ("last", "mean"):
        options += ["--pooling", pooling]
    if process.n_ctx:
        most = DEMO_POSITIONS if process.chat_template_file else process.n_ctx
        options += ["--max-model-len", str(min(most, process.n_ctx // slots))]
    if process.api_key:
        options += ["--api-key", process.api_key]
    return tuple(options)


def with_template(template: str) -> str:
    """The bundled model with another chat template."""
    demo, folder = Path(os.environ["DEMO"]), Path(tempfile.mkdtemp(prefix="with-template-"))
    for file in demo.iterdir():
        if file.is_file():
            (folder / file.name).symlink_to(template_file(template) if file.suffix == ".jinja" else file)
    return str(folder)


def template_file(template: str) -> Path:
    file = Path(template).resolve()
    assert file.exists(), file
    return file


def start(process: Any, timeout_seconds: int = 0) -> None:
    del timeout_seconds
    key = (process.chat_template_file or "", *options_of(process))
    if key not in running:
        model = with_template(key[0]) if key[0] else os.environ["MODEL"]
        running[key] = launch.Server(model, key[1:])
    process.server_port = running[key].port


def leave_running(process: Any) -> None:
    """The next test may want the same server; pytest_unconfigure stops it."""
    process.process = None


def translated(process: Any, path: str, data: Any) -> tuple[str, Any]:
    """A request to llama.cpp's server as one to OpenAI's interface."""
    if not isinstance(data, dict):
        return ("/v1" + path if path in OPENAI_PATHS else path), data
    body = {name: value for name, value in data.items() if name not in LLAMA_ONLY}
    if path in ("/completion", "/v1/completions", "/completions"):
        num_tokens = body.pop("n_predict", process.n_predict)
        if num_tokens is not None and num_tokens >= 0:
            body.setdefault("max_tokens", num_tokens)
        body.setdefault("temperature", process.temperature)
        body.setdefault("seed", process.seed)
        return "/v1/completions", body
    if path == "/tokenize":
        return path, {"prompt": body["content"], "add_special_tokens": body.get("add_special", False)}
    return ("/v1" + path if path in OPENAI_PATHS else path), body


def answer(path: str, data: Any, body: Any) -> Any:
    """An answer of OpenAI's interface as llama.cpp's server would give it."""
    if not isinstance(body, dict) or "error" in body:
        return body
    if path.endswith("/chat/completions") and body.get("object") == "chat.completion.chunk":
        for choice in body["choices"]:
            if choice["delta"].get("content") == "":  # of the role, as vLLM has it; null there
                choice["delta"]["content"] = None
    if path == "/detokenize":
        return {"content": body["prompt"]}
    if path in ("/completion", "/completions"):
        answers = [
            {"content": choice["text"], "stop": choice["finish_reason"] is not None} for choice in body["choices"]
        ]
        prompt = data["prompt"]
        several = isinstance(prompt, list) and any(isinstance(part, list) for part in prompt)
        return answers if several else answers[0]
    return body


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    del config
    import utils  # the suite's own, which its conftest.py has put on the path

    process = utils.ServerProcess
    make_request, make_stream_request = process.make_request, process.make_stream_request

    def request(self: Any, method: str, path: str, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        to, body = translated(self, path, data)
        result = make_request(self, method, to, body, *args, **kwargs)
        result.body = answer(path, data, result.body)
        return result

    def stream(self: Any, method: str, path: str, data: Any = None, *args: Any, **kwargs: Any) -> Iterator[Any]:
        to, body = translated(self, path, data)
        for event in make_stream_request(self, method, to, body, *args, **kwargs):
            yield answer(path, data, event)

    process.start, process.stop = start, leave_running
    process.make_request, process.make_stream_request = request, stream
    utils.ServerPreset.load_all = staticmethod(lambda: None)


def pytest_unconfigure() -> None:
    for (template, *_), server in running.items():
        server.stop()
        if template:
            shutil.rmtree(server.model)
