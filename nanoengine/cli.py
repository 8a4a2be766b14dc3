"""The `nanoengine` command: demo, generate, chat, serve, models, fetch."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from nanoengine import __version__
from nanoengine.arguments import Parser, byte_count, docstring
from nanoengine.builder import is_installed
from nanoengine.core.config import POLICIES
from nanoengine.errors import InvalidPrompt, InvalidSamplingParams, NanoEngineError, StepFailed
from nanoengine.llm import LLM, show_log
from nanoengine.models.fetch import DOWNLOADS
from nanoengine.models.fetch import fetch as fetch_model
from nanoengine.models.tokenizer import Message

if TYPE_CHECKING:
    from nanoengine.sampling.params import SamplingParams

DEMO_PROMPTS = [  # none ends in blanks: in the files that the demo model knows, a token begins with the blank before it
    "def binary_search(",
    "class Stack:\n    def __init__(self",
    "import json\nimport os\n\ndef load_config(path):\n",
    "for i in range(",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "try:\n    import readline\nexcept",
]

SAMPLING = {
    "temperature": (0.8, "0 is greedy"),
    "top_k": (0, "0 keeps all tokens"),
    "top_p": (0.95, "1 keeps all tokens"),
    "min_p": (0.0, "0 keeps all tokens"),
    "presence_penalty": (0.0, "makes tokens that the answer has already less likely; 0 does nothing"),
    "frequency_penalty": (0.0, "the same, times how often the answer has them; 0 does nothing"),
    "repetition_penalty": (1.0, "the same for tokens of prompt and answer, as a factor; 1 does nothing"),
}
"""Options of sampling: their defaults here, and their help."""

FIRST_STEPS = f"""\
nanoengine {__version__} runs language models on this machine. To begin:

  nanoengine demo                    completes code with the bundled model
  nanoengine fetch smollm2           downloads a small chat model (98 MB)
  nanoengine chat --model smollm2    talks with it
  nanoengine serve smollm2           serves it, with OpenAI's interface

`nanoengine --help` lists all commands, `nanoengine chat --help` the options of one."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, 1 for an error of the user's, 2 for wrong arguments, 130 after Ctrl-C."""
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
        args = _parser().read(argv)
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

    params = SamplingParams(temperature=args.temperature, top_p=0.95, max_tokens=args.max_tokens, seed=args.seed)
    with _open(args) as llm:
        start = perf_counter()
        outputs = llm.generate(DEMO_PROMPTS, params)
        seconds = perf_counter() - start
        for output in outputs:
            bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else (f"=== {output.prompt!r}\n", "")
            print(f"\n{bold}{output.prompt}{plain}{output.outputs[0].text}")
        num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(
            f"\n{len(outputs)} completions, {num_tokens} tokens in {seconds:.2f} s ({num_tokens / seconds:.0f} tokens/s)"
        )

        shared = "".join(f"{output.prompt}{output.outputs[0].text}\n\n" for output in outputs)
        first = llm.generate(shared + "# first", SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)[0]
        second = llm.generate(shared + "# second", SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)[0]
        for name, output in (("first", first), ("second", second)):
            print(
                f"{name} prompt with a shared beginning: {len(output.prompt_token_ids)} tokens, {output.num_cached_tokens} of "
                f"them from the prefix cache, first token after {1000 * (output.metrics.ttft or 0):.1f} ms"
            )


def generate(args: argparse.Namespace) -> None:
    """Complete the prompts of the command line, or the text on standard input."""
    prompts = args.prompt or [_standard_input()]
    params = _sampling_params(args)
    with _open(args) as llm:
        if len(prompts) == 1 and params.n == 1:
            for piece in llm.stream(prompts[0], params):
                print(piece, end="", flush=True)
            print()
            return
        for output in llm.generate(prompts, params):
            for completion in output.outputs:
                print(f"--- {output.prompt!r} [{completion.index}] ({completion.finish_reason})\n{completion.text}")


def chat(args: argparse.Namespace) -> None:
    """Talk with a model in the terminal; its answers appear as they are made."""
    params = _sampling_params(args)
    messages: list[Message] = [{"role": "system", "content": args.system}] if args.system else []
    with _open(args) as llm:
        print(
            "Type a message; /reset forgets the conversation, Ctrl-C ends an answer, an empty line or Ctrl-D ends the chat."
        )
        while True:
            try:
                text = input("\n> ").strip()
            except EOFError:
                break
            if not text:
                break
            if text == "/reset":
                messages = messages[: bool(args.system)]
                continue
            messages.append({"role": "user", "content": text})
            answer = ""
            try:
                for piece in llm.stream(llm.tokenizer.encode_chat(messages), params):
                    answer += piece
                    print(piece, end="", flush=True)
            except KeyboardInterrupt:
                print(" [interrupted]", end="")
            except (InvalidPrompt, StepFailed) as error:  # such as a conversation that has outgrown the model
                print(f"nanoengine: {type(error).__name__}: {error}", file=sys.stderr)
                messages.pop()
                continue
            print()
            messages.append({"role": "assistant", "content": answer})


def serve(args: argparse.Namespace) -> None:
    """Serve a model over HTTP, as clients of OpenAI and vLLM expect it."""
    from nanoengine.server.command import run

    show_log()
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
    """Download a small model that can hold a conversation."""
    print(f"{fetch_model(args.name)}\nTalk with it: nanoengine chat --model {args.name}")


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidPrompt(f"standard input is no text: {error}") from error


def _open(args: argparse.Namespace) -> LLM:
    names = ("dtype", "device", "max_model_len", "kv_cache_memory", "scheduling_policy")
    return LLM(args.model, **{name: getattr(args, name) for name in names if getattr(args, name) is not None})


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
    from nanoengine import SamplingParams  # not with this module: other commands work where that folder was deleted

    values = {name: getattr(args, name) for name in (*SAMPLING, "seed", "max_tokens", "stop", "n")}
    return SamplingParams(**values, structured_outputs=_structured_outputs(args))


def _structured_outputs(args: argparse.Namespace) -> dict[str, Any] | None:
    """What the options of `generate` say the text must be."""
    for name, field in (("json_schema", "json"), ("regex", "regex"), ("choice", "choice")):
        if (value := getattr(args, name, None)) is not None:
            return {field: _schema_text(value) if name == "json_schema" else value}
    return None


def _schema_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSamplingParams(f"--json-schema {path} cannot be read: {error}") from error


def _parser() -> Parser:
    parser = Parser(prog="nanoengine", description="A minimal, complete LLM inference engine.")
    parser.add_argument("--version", action="version", version=f"nanoengine {__version__}")
    parser.set_defaults(run=first_steps)
    commands = parser.add_subparsers(metavar="command")
    for run, max_tokens in ((demo, 96), (generate, 128), (chat, 512)):
        command = _command(commands, run)
        command.add_argument(
            "--model",
            default="demo",
            help=f'"demo" (the default), {_known()}, a local folder, a .gguf file or a hub name',
        )
        command.add_argument("--dtype", help="float32, bfloat16, float16 or auto")
        command.add_argument("--device", help="cpu, cuda, cuda:N or auto")
        command.add_argument("--max-model-len", type=int, help="longest sequence in tokens")
        command.add_argument("--kv-cache-memory", type=byte_count, help="size of the KV pool, such as 2GiB")
        command.add_argument("--scheduling-policy", help=" or ".join(POLICIES))
        command.add_argument(
            "--max-tokens", type=int, default=max_tokens, help="most new tokens (default: %(default)s)"
        )
        command.add_argument("--seed", type=int, help="makes sampling repeatable")
        command.add_argument("-v", "--verbose", action="store_true", help="show how the model was loaded")
        for name, (default, text) in SAMPLING.items():
            if run is not demo or name == "temperature":
                command.add_argument(
                    "--" + name.replace("_", "-"),
                    type=type(default),
                    default=default,
                    help=f"{text} (default: {default})",
                )
        if run is demo:
            continue
        command.add_argument("--stop", action="append", default=[], help="a string that ends the text; may be repeated")
        if run is generate:
            command.add_argument("-n", type=int, default=1, help="completions per prompt (default: 1)")
            shape = command.add_mutually_exclusive_group()
            shape.add_argument("--json-schema", type=Path, metavar="FILE", help="the text is JSON of this schema")
            shape.add_argument("--regex", help="the text matches this expression as a whole")
            shape.add_argument("--choice", action="append", help="the text is this string; repeat it for others")
            command.add_argument("prompt", nargs="*", help="prompts; without any, standard input is one")
        else:
            command.set_defaults(n=1)
            command.add_argument("--system", help="a system message")
    if is_installed("server"):
        from nanoengine.server.command import add_arguments

        add_arguments(_command(commands, serve))
    _command(commands, models)
    _command(commands, fetch).add_argument("name", help=_known())
    return parser


def _command(commands: Any, run: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
    text = docstring(run)
    command: argparse.ArgumentParser = commands.add_parser(run.__name__, help=text.split("\n")[0], description=text)
    command.set_defaults(run=run, parser=command)
    return command


def _known() -> str:
    return " or ".join(f'"{name}"' for name in DOWNLOADS)
