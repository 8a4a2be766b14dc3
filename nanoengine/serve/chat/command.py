"""`nanoengine chat` and `nanoengine run`: choose the model, and talk in a terminal or as a filter."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from nanoengine.errors import InvalidConfig, ModelNotFound
from nanoengine.llm import LLM
from nanoengine.models.fetch import DOWNLOADS, fetch
from nanoengine.serve.arguments import standard_input
from nanoengine.serve.chat.session import Session

Values = Mapping[str, Any]
SMALL = "smollm2"


def chat_model(name: str | None) -> str:
    """The model of a chat: the named one, or the small one if it was fetched.

    Raises:
        ModelNotFound: it is not.
    """
    if name is not None:
        return name
    if not DOWNLOADS[SMALL].path.is_file():
        raise ModelNotFound(
            f"a chat needs a model: `nanoengine run {SMALL}` fetches a small one ({DOWNLOADS[SMALL].num_bytes / 1e6:.0f} MB) and "
            "talks with it; `nanoengine chat MODEL` takes a folder, a .gguf file or a hub name. The demo cannot chat"
        )
    return SMALL


def fetched(name: str) -> str:
    """The name of a model; one that `nanoengine fetch` knows is fetched first."""
    if name in DOWNLOADS and not DOWNLOADS[name].path.is_file():
        fetch(name)
    return name


def run(model: str, options: Values, values: Values, system: str, prompt: str, adapter: Any) -> None:
    """Talk with a model until the user leaves; with a prompt, or where standard input or output is no terminal, answer once.

    Args:
        model: its name.
        options: of the engine.
        values: sampling parameters of the command line. An answer may be as long as the model can, unless max_tokens
            is among them or advised by the model's makers.
        system: a system message, or nothing.
        prompt: a message that follows what is piped in, or nothing.
        adapter: a LoRARequest for all answers, or None.

    Raises:
        InvalidConfig: a terminal needs packages that are missing.
        InvalidPrompt: there is no prompt, and standard input has no text.
    """
    if prompt or not (sys.stdin.isatty() and sys.stdout.isatty()):
        piped = "" if prompt and sys.stdin.isatty() else standard_input(may_be_empty=bool(prompt))
        with LLM(model, use_tqdm=False, **options) as llm:
            _filter(Session(llm, _params(llm, values), system, adapter), f"{piped}\n{prompt}".strip())
        return
    try:
        from nanoengine.serve.chat.terminal import Terminal
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("nanoengine"):
            raise
        raise InvalidConfig(
            f"a chat in a terminal needs {error.name}: pip install {error.name}; "
            "without it, `echo hello | nanoengine chat MODEL` answers standard input"
        ) from error
    with LLM(model, **options) as llm:
        Terminal(Session(llm, _params(llm, values), system, adapter)).run()


def _params(llm: LLM, values: Mapping[str, Any]) -> Any:
    longest = {"max_tokens": llm.built.models.default_sampling.get("max_tokens")}
    return dataclasses.replace(llm.get_default_sampling_params(), **{**longest, **values})


def _filter(session: Session, text: str) -> None:
    """The answer to one message, without thoughts, on standard output."""
    end = "\n"
    for piece in session.ask(text):
        if not piece.is_thought:
            print(piece.text, end="", flush=True)
            end = "" if piece.text.endswith("\n") else "\n"
    print(end=end)
