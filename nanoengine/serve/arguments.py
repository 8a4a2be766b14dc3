"""Arguments of the command line: help without noise, and errors in two lines, with what was perhaps meant."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from nanoengine.errors import InvalidConfig, InvalidPrompt, did_you_mean
from nanoengine.sizes import parse_bytes

LONGEST = 500
WORD = re.compile(r"[\w-]+")
CHOICE = re.compile(r"(.*invalid choice: )'(.*)' \(choose from (.*)\)", re.DOTALL)


class Help(argparse.HelpFormatter):
    """Help that begins with the arguments that have no dashes; all others are listed below."""

    def add_usage(self, usage: str | None, actions: Any, groups: Any, prefix: str | None = None) -> None:
        shown = [action for action in actions if action.dest == "help" or not action.option_strings]
        super().add_usage(usage, shown, [], prefix)


class Parser(argparse.ArgumentParser):
    """The parser of a command, or of all. Names are whole: the beginning of one may be another option tomorrow."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, formatter_class=Help, **options)

    def read(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """As `parse_args`; for an option that nobody knows, the nearest of its command is named."""
        args, rest = self.parse_known_args(arguments)
        while rest and not rest[0].startswith("-") and hasattr(args, "prompt"):
            args.prompt.append(rest.pop(0))  # it stands behind an option, where argparse expects no more prompts
        if rest:
            command: Parser = getattr(args, "parser", self)
            usage, (word, _, value) = command.format_usage(), rest[0].partition("=")
            model = value or getattr(args, "model", "")
            model = " ".join(model) if isinstance(model, list) else model
            if word in ("--model", "-m") and model and re.search(r"(?<![\w-])model(?![\w-])", usage):
                command.error(f"the model is typed without {word}: {command.prog} {model}")
            names = re.findall(r"--([a-z][\w-]*)", command.format_help())
            near = did_you_mean(word.lstrip("-"), names)  # dashes make all alike
            command.error(f"unknown argument {rest[0]}" + near.replace("'", "'--", 1))
        return args

    def error(self, message: str) -> NoReturn:
        if match := CHOICE.fullmatch(message):
            start, word, choices = match.groups()
            message = f"{start}{word!r}; known are {choices}{did_you_mean(word, WORD.findall(choices))}"
        if message.endswith("required: model"):
            message += f", such as {self.prog} smollm2"
        if len(message) > LONGEST:
            message = f"{message[: LONGEST // 2]} ... {message[-LONGEST // 2 :]}"
        self.exit(2, f"nanoengine: {message}\nsee {self.prog} --help\n")


def byte_count(text: str) -> int:
    """The type of an argument such as 2GiB."""
    try:
        return parse_bytes("the size", text)
    except InvalidConfig as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def standard_input(may_be_empty: bool = False) -> str:
    """All text on standard input; raises InvalidPrompt where it is none, or empty."""
    if sys.stdin.isatty():
        print("Type a text, then Enter and Ctrl-D:", file=sys.stderr)
    try:
        text = sys.stdin.read().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise InvalidPrompt(f"standard input is no text: {error}") from error
    if not (may_be_empty or text.strip()):
        raise InvalidPrompt("standard input has no text to answer: pipe one in, or add it to the command in quotes")
    return text


def docstring(thing: Any) -> str:
    """The docstring of a class or a function."""
    return inspect.getdoc(thing) or ""
