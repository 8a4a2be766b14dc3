"""The `nanoengine` command: demo, generate, chat, run, serve, ps, models, show, fetch."""

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
from nanoengine.builder import is_installed, require
from nanoengine.errors import NanoEngineError
from nanoengine.llm import LLM
from nanoengine.models.fetch import DOWNLOADS
from nanoengine.models.fetch import fetch as fetch_model
from nanoengine.models.names import find_model
from nanoengine.plugins import PluginOptions
from nanoengine.serve.arguments import Parser, docstring, standard_input
from nanoengine.serve.engine_options import add_engine_options, early_values, engine_values
from nanoengine.serve.other_commands import advice
from nanoengine.serve.sampling_options import add_sampling_options, sampling_values

if TYPE_CHECKING:
    from nanoengine.features.lora.request import LoRARequest
    from nanoengine.features.sampling.params import SamplingParams

DEMO_PROMPTS = [  # none ends in blanks: in the files that the demo model knows, a token begins with the blank before it
    "def binary_search(",
    "class Stack:\n    def __init__(self",
    "import json\nimport os\n\ndef load_config(path):\n",
    "for i in range(",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "try:\n    import readline\nexcept",
]

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
    arguments = sys.argv[1:] if argv is None else argv
    if (words := advice(arguments)) is not None:
        _tell(f"nanoengine: {words}")
        return 2
    try:
        args = _parser(arguments).read(arguments)
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
    with suppress(OSError):  # there is no reader
        print(message, file=sys.stderr, flush=True)


def _drop_output() -> None:
    """Discard unwritten output; Python would try once more at its end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def first_steps(_: argparse.Namespace) -> None:
    """What to type."""
    print(FIRST_STEPS)


def demo(args: argparse.Namespace) -> None:
    """Complete a few beginnings of Python code in one batch, then once more to show the prefix cache."""
    from nanoengine import SamplingParams

    values = sampling_values(args)
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
    prompts = args.prompt or [standard_input()]
    values, adapter = sampling_values(args), _adapter(args)
    with _open(args) as llm:
        params = cast("SamplingParams", replace(llm.get_default_sampling_params(), **values))
        if len(prompts) == 1 and params.n == 1:
            for piece in llm.stream(prompts[0], params, lora_request=adapter):
                print(piece, end="", flush=True)
            print()
            return
        for output in llm.generate(prompts, params, lora_request=adapter):
            for completion in output.outputs:
                print(f"--- {output.prompt!r} [{completion.index}] ({completion.finish_reason})\n{completion.text}")


def chat(args: argparse.Namespace) -> None:
    """Talk with a model in the terminal; without one, answer the text on standard input."""
    from nanoengine.serve.chat.command import chat_model

    model, *words = [word for word in (args.named, args.model, *args.prompt) if word] or [None]
    _talk(args, chat_model(model), words)


def run(args: argparse.Namespace) -> None:
    """Talk with a model, which is fetched first where `fetch` can."""
    from nanoengine.serve.chat.command import fetched

    _talk(args, fetched(args.model), args.prompt)


def _talk(args: argparse.Namespace, model: str, words: Sequence[str]) -> None:
    from nanoengine.serve.chat import command

    adapter = _adapter(args)
    command.run(model, _engine_options(args), sampling_values(args), args.system, " ".join(words), adapter)


def serve(args: argparse.Namespace) -> None:
    """Serve a model, or several, over HTTP, as clients of OpenAI and vLLM expect it."""
    from nanoengine.serve.command import run

    run(args)


def ps(args: argparse.Namespace) -> None:
    """List the models of a running server, and whether they are loaded."""
    from nanoengine.serve.front.ps import table

    print(table(args.url, args.api_key))


def models(_: argparse.Namespace) -> None:
    """List the models on this machine, what they take, and whether they run."""
    from nanoengine.models.inventory import inventory, table

    print(table(inventory()))
    print(
        "\n`--model NAME` takes one of them; others come from the hub when they are first used.\n"
        "Where a device does not compute the dtype itself, float32 takes its place, and more memory."
    )


def show(args: argparse.Namespace) -> None:
    """Show what a model takes, and whether it runs here."""
    from nanoengine.models.inventory import describe, table

    find_model(args.name)  # of a name that stands for nothing, the error says all
    print(table([describe(args.name, args.name)]))


def fetch(args: argparse.Namespace) -> None:
    """Download a small model."""
    path, name = fetch_model(args.name), args.name
    if DOWNLOADS[name].has_chat_template:
        print(f"{path}\nTalk with it: nanoengine chat {name}")
    else:
        print(
            f"{path}\nIt was taught no conversations, and goes on with texts: nanoengine generate --model {name} 'Once upon'"
        )


def _open(args: argparse.Namespace) -> LLM:
    return LLM(args.model, **_engine_options(args))


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    adapters = {} if getattr(args, "adapter", None) is None else {"enable_lora": True}
    return adapters | engine_values(args, but=("seed",))


def _adapter(args: argparse.Namespace) -> LoRARequest | None:
    if args.adapter is None:
        return None
    require("lora")
    from nanoengine.features.lora.request import LoRARequest

    return LoRARequest("adapter", lora_path=args.adapter)


def _parser(arguments: Sequence[str]) -> Parser:
    parser = Parser(prog="nanoengine", description="A minimal, complete LLM inference engine.")
    parser.add_argument("--version", action="version", version=f"nanoengine {__version__}")
    parser.set_defaults(run=first_steps)
    commands = parser.add_subparsers(metavar="command")
    talks = (chat, run) if is_installed("chat") else ()
    typed = arguments[0] if arguments else ""
    names = f'"demo", {_known()}, a local folder, a .gguf file or a hub name'
    for function in (demo, generate, *talks):
        command, kinds = _command(commands, function), names
        if function in talks:
            kinds += "; without one, smollm2, once fetched" if function is chat else ""
            command.add_argument("model", nargs="?" if function is chat else None, help=kinds)
            command.add_argument("prompt", nargs="*", default=[], help="a message: its answer is all that is written")
            command.add_argument("--system", default="", metavar="TEXT", help="a system message")
        if function is chat:
            command.add_argument("--model", dest="named", help=argparse.SUPPRESS)  # as `generate` has it
        if function not in talks:
            command.add_argument("--model", default="demo", help=f"{kinds} (default: demo)")
        command.add_argument("-v", "--verbose", action="store_true", help="show how the model was loaded")
        add_sampling_options(command, {demo: 96, generate: 128}.get(function))
        if typed == function.__name__:  # the options of all would cost milliseconds
            plugins = PluginOptions(plugins=early_values(arguments, "--plugins").plugins)
            add_engine_options(command.add_argument_group("engine"), plugins, but=("seed",))
        if function is not demo:
            command.add_argument("--adapter", metavar="FOLDER", help="an adapter (LoRA) that answers")
        if function is generate:
            command.add_argument("-n", type=int, default=1, help="completions per prompt (default: 1)")
            shape = command.add_mutually_exclusive_group()
            shape.add_argument("--json-schema", type=Path, metavar="FILE", help="the text is JSON of this schema")
            shape.add_argument("--regex", help="the text matches this expression as a whole")
            shape.add_argument("--choice", action="append", help="the text is this string; repeat it for others")
            command.add_argument("prompt", nargs="*", default=[], help="prompts; without any, standard input is one")
    if is_installed("server"):
        command = _command(commands, serve)
        if typed == "serve":
            from nanoengine.serve.command import add_arguments, named_plugins

            add_arguments(command, named_plugins(arguments))
        command = _command(commands, ps)
        command.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
        command.add_argument("--api-key", help="one of its keys (default: that in NANOENGINE_API_KEY)")
    _command(commands, models, "list", "ls")
    _command(commands, show).add_argument("name", help=names)
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
