"""The `nanoengine` command: demo, generate, chat, run, serve, models, fetch."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

from nanoengine import __version__
from nanoengine.builder import is_installed
from nanoengine.core.config import POLICIES
from nanoengine.errors import InvalidPrompt, InvalidSamplingParams, NanoEngineError
from nanoengine.llm import LLM
from nanoengine.models.fetch import DOWNLOADS
from nanoengine.models.fetch import fetch as fetch_model
from nanoengine.serve.arguments import Parser, byte_count, docstring

if TYPE_CHECKING:
    from nanoengine.features.sampling.params import SamplingParams

DEMO_PROMPTS = [  # none ends in blanks: in the files that the demo model knows, a token begins with the blank before it
    "def binary_search(",
    "class Stack:\n    def __init__(self",
    "import json\nimport os\n\ndef load_config(path):\n",
    "for i in range(",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "try:\n    import readline\nexcept",
]

SAMPLING = {
    "temperature": (float, "0 is greedy"),
    "top_k": (int, "0 keeps all tokens"),
    "top_p": (float, "1 keeps all tokens"),
    "min_p": (float, "0 keeps all tokens"),
    "presence_penalty": (float, "makes tokens that the answer has already less likely; 0 does nothing"),
    "frequency_penalty": (float, "the same, times how often the answer has them; 0 does nothing"),
    "repetition_penalty": (float, "the same for tokens of prompt and answer, as a factor; 1 does nothing"),
}
"""Options of sampling, and their help. Those that are not given are the model's own (models/default_sampling.py)."""

FIRST_STEPS = f"""\
nanoengine {__version__} runs language models on this machine. To begin:

  nanoengine demo                    completes code with the bundled model
  nanoengine run smollm2             downloads a small chat model (98 MB), and talks with it
  nanoengine serve smollm2           serves it, with OpenAI's interface

`nanoengine --help` lists all commands, `nanoengine chat --help` the options of one."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, 1 for an error of the user's, 2 where `argv` is unreadable, 130 at Ctrl-C."""
    try:
        status = _run(argv)
        sys.stdout.flush()  # here, and not at the interpreter's end, a closed pipe can be caught
    except BrokenPipeError:  # whoever read the output has enough of it
        _drop_output()
        return 0
    except OSError as error:  # such as a disk that is full
        _drop_output()
        _tell(f"nanoengine: {type(error).__name__}: {error}")
        return 1
    return status


def _run(argv: Sequence[str] | None) -> int:
    try:
        args = _parser(sys.argv[1:] if argv is None else argv).read(argv)
        if getattr(args, "verbose", False):
            logging.getLogger("nanoengine").setLevel(logging.DEBUG)
        args.run(args)
    except NanoEngineError as error:
        _tell(f"nanoengine: {type(error).__name__}: {error}")
        return 1
    except MemoryError as error:
        _tell(f"nanoengine: there is not enough memory ({error}): lower --kv-cache-memory or --max-model-len")
        return 1
    except KeyboardInterrupt:
        _tell("\nnanoengine: interrupted")
        return 130
    except SystemExit as end:  # argparse: after help, or for a mistake
        return int(end.code or 0)
    return 0


def _tell(message: str) -> None:
    with suppress(OSError):  # nobody can be told
        print(message, file=sys.stderr, flush=True)


def _drop_output() -> None:
    """What is still to be written goes nowhere; Python would try once more at its end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def first_steps(_: argparse.Namespace) -> None:
    """What to type."""
    print(FIRST_STEPS)


def demo(args: argparse.Namespace) -> None:
    """Complete a few beginnings of Python code in one batch, then once more to show the prefix cache."""
    from nanoengine import SamplingParams

    values = _sampling_values(args)
    with _open(args) as llm:
        start = perf_counter()
        outputs = llm.generate(DEMO_PROMPTS, replace(llm.get_default_sampling_params(), **values))
        seconds = perf_counter() - start
        for output in outputs:
            bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else (f"=== {output.prompt!r}\n", "")
            print(f"\n{bold}{output.prompt}{plain}{output.outputs[0].text}")
        num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(
            f"\n{len(outputs)} completions, {num_tokens} tokens in {seconds:.2f} s ({num_tokens / seconds:.0f} tokens/s)"
        )

        text = "".join(f"{output.prompt}{output.outputs[0].text}\n\n" for output in outputs)
        shared = llm.tokenizer.encode(text)[: llm.engine.max_model_len // 2]
        for name in ("first", "second"):
            prompt = [*shared, *llm.tokenizer.encode(f"# {name}", add_special_tokens=False)]
            [output] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
            print(
                f"{name} prompt with a shared beginning: {len(output.prompt_token_ids)} tokens, {output.num_cached_tokens} of "
                f"them from the prefix cache, first token after {1000 * (output.metrics.ttft or 0):.1f} ms"
            )


def generate(args: argparse.Namespace) -> None:
    """Complete the prompts of the command line, or the text on standard input."""
    prompts = args.prompt or [_standard_input()]
    values = _sampling_values(args)
    with _open(args) as llm:
        params = cast("SamplingParams", replace(llm.get_default_sampling_params(), **values))
        if len(prompts) == 1 and params.n == 1:
            for piece in llm.stream(prompts[0], params):
                print(piece, end="", flush=True)
            print()
            return
        for output in llm.generate(prompts, params):
            for completion in output.outputs:
                print(f"--- {output.prompt!r} [{completion.index}] ({completion.finish_reason})\n{completion.text}")


def chat(args: argparse.Namespace) -> None:
    """Talk with a model in the terminal; without one, answer the text on standard input."""
    from nanoengine.serve.chat.command import chat_model

    _talk(args, chat_model(args.model or args.named))


def run(args: argparse.Namespace) -> None:
    """Talk with a model, which is fetched first where `fetch` can."""
    from nanoengine.serve.chat.command import fetched

    _talk(args, fetched(args.model))


def _talk(args: argparse.Namespace, model: str) -> None:
    from nanoengine.serve.chat import command

    command.run(model, _engine_options(args), _sampling_values(args), args.system)


def serve(args: argparse.Namespace) -> None:
    """Serve a model over HTTP, as clients of OpenAI and vLLM expect it."""
    from nanoengine.serve.server.command import run

    run(args)


def models(_: argparse.Namespace) -> None:
    """List the models on this machine, what they take, and whether they run."""
    from nanoengine.models.inventory import inventory, table

    print(table(inventory()))
    print(
        "\n`--model NAME` takes one of them; others come from the hub when they are first used.\n"
        "Where a device does not compute the dtype itself, float32 takes its place, and more memory."
    )


def fetch(args: argparse.Namespace) -> None:
    """Download a small model."""
    path, name = fetch_model(args.name), args.name
    if DOWNLOADS[name].has_chat_template:
        print(f"{path}\nTalk with it: nanoengine chat {name}")
    else:
        print(
            f"{path}\nIt was taught no conversations, and goes on with texts: nanoengine generate --model {name} 'Once upon'"
        )


def _standard_input() -> str:
    try:
        return sys.stdin.read().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise InvalidPrompt(f"standard input is no text: {error}") from error


def _open(args: argparse.Namespace) -> LLM:
    return LLM(args.model, **_engine_options(args))


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    names = ("dtype", "device", "max_model_len", "kv_cache_memory", "scheduling_policy", "chat_template", "plugins")
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


def _sampling_values(args: argparse.Namespace) -> dict[str, Any]:
    """What was said of sampling, checked before a model is loaded."""
    from nanoengine import SamplingParams  # not with this module: other commands work where that folder was deleted

    names = (*SAMPLING, "seed", "max_tokens", "stop", "n")
    values = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    if (shape := _structured_outputs(args)) is not None:
        values["structured_outputs"] = shape
    SamplingParams(**values)
    return values


def _structured_outputs(args: argparse.Namespace) -> dict[str, Any] | None:
    """What the options of `generate` say the text must be."""
    for name, field in (("json_schema", "json"), ("regex", "regex"), ("choice", "choice")):
        if (value := getattr(args, name, None)) is not None:
            return {field: _schema_text(value) if name == "json_schema" else value}
    return None


def _schema_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSamplingParams(f"--json-schema {path} cannot be read: {error}") from error


def _parser(arguments: Sequence[str]) -> Parser:
    parser = Parser(prog="nanoengine", description="A minimal, complete LLM inference engine.")
    parser.add_argument("--version", action="version", version=f"nanoengine {__version__}")
    parser.set_defaults(run=first_steps)
    commands = parser.add_subparsers(metavar="command")
    talks = (chat, run) if is_installed("chat") else ()
    for function in (demo, generate, *talks):
        command = _command(commands, function)
        kinds = f'"demo", {_known()}, a local folder, a .gguf file or a hub name'
        if function in talks:
            kinds += "; without one, smollm2, once fetched" if function is chat else ""
            command.add_argument("model", nargs="?" if function is chat else None, help=kinds)
            command.add_argument("--system", default="", metavar="TEXT", help="a system message")
            command.add_argument(
                "--chat-template", metavar="FILE", help="a Jinja template, in place of the model's own"
            )
        if function is chat:
            command.add_argument("--model", dest="named", help=argparse.SUPPRESS)  # as `generate` has it
        if function not in talks:
            command.add_argument("--model", default="demo", help=f"{kinds} (default: demo)")
        command.add_argument("--dtype", help="float32, bfloat16, float16 or auto")
        command.add_argument("--device", help="cpu, cuda, cuda:N or auto")
        command.add_argument("--plugins", nargs="+", metavar="MODULE", help="capabilities and families to load")
        command.add_argument("--max-model-len", type=int, help="longest sequence in tokens")
        command.add_argument("--kv-cache-memory", type=byte_count, help="size of the KV pool, such as 2GiB")
        command.add_argument("--scheduling-policy", help=" or ".join(POLICIES))
        most = {demo: 96, generate: 128}.get(function)  # a chat's: as many as the model has room for
        text = f"most new tokens (default: {most or 'as there is room'})"
        command.add_argument("--max-tokens", type=int, default=most or argparse.SUPPRESS, help=text)
        command.add_argument("--seed", type=int, help="makes sampling repeatable")
        command.add_argument("-v", "--verbose", action="store_true", help="show how the model was loaded")
        for name, (kind, text) in SAMPLING.items():
            if function is not demo or name == "temperature":
                command.add_argument("--" + name.replace("_", "-"), type=kind, default=argparse.SUPPRESS, help=text)
        if function is demo:
            continue
        command.add_argument("--stop", action="append", default=[], help="a string that ends the text; may be repeated")
        if function is generate:
            command.add_argument("-n", type=int, default=1, help="completions per prompt (default: 1)")
            shape = command.add_mutually_exclusive_group()
            shape.add_argument("--json-schema", type=Path, metavar="FILE", help="the text is JSON of this schema")
            shape.add_argument("--regex", help="the text matches this expression as a whole")
            shape.add_argument("--choice", action="append", help="the text is this string; repeat it for others")
            command.add_argument("prompt", nargs="*", help="prompts; without any, standard input is one")
    if is_installed("server"):
        from nanoengine.serve.server.command import add_arguments, named_plugins

        plugins = named_plugins(arguments) if arguments and arguments[0] == "serve" else None
        add_arguments(_command(commands, serve), plugins)
    _command(commands, models, "list")
    _command(commands, fetch, "pull").add_argument("name", help=_known())
    return parser


def _command(commands: Any, run: Callable[[argparse.Namespace], None], *others: str) -> argparse.ArgumentParser:
    text = docstring(run)
    command: argparse.ArgumentParser = commands.add_parser(
        run.__name__, aliases=others, help=text.split("\n")[0], description=text
    )
    command.set_defaults(run=run, parser=command)
    return command


def _known() -> str:
    return " or ".join(f'"{name}"' for name in DOWNLOADS)
