"""The process that renders chat templates: `python -I template_process.py DESCRIPTOR`. It imports nothing of this package.

A template is a Jinja program in the files of a model. Jinja's sandbox isolates it from the machine, and the limits of this
process bound its time and memory. Its environment is that of transformers
(https://huggingface.co/docs/transformers/chat_templating_writing).
"""

from __future__ import annotations

import json
import marshal
import os
import resource
import signal
import sys
from datetime import datetime
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import NoReturn

from jinja2 import TemplateError, nodes
from jinja2.environment import Template
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SECONDS, MAX_BYTES = 10.0, 1 << 30
"""Limits: seconds of a CPU for a text, and bytes of address space of the process."""

MAX_TEXT_BYTES = 64 << 20
"""Limit of a text in UTF-8; the longest prompts have a quarter of it."""

TOO_LARGE = 3
"""Status of the process after a template exceeds MAX_BYTES or MAX_TEXT_BYTES."""

OK, REFUSED = b"+", b"-"
"""First byte of an answer, before the text or the message of the template's error."""


def answer_all(connection: Connection) -> None:
    """Serve requests, each a marshalled (template, values), or (template, None) to compile only, until the client closes, which
    raises EOFError.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    while True:
        request = connection.recv_bytes()
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)  # its signal ends the process
        try:
            template, values = marshal.loads(request)
            program = _compiled(template)
            answer = OK + (b"" if values is None else program.render(values).encode(errors="surrogatepass"))
        except MemoryError:
            os._exit(TOO_LARGE)
        except Exception as error:  # templates raise any kind
            answer = REFUSED + str(error)[:200].encode(errors="replace")
        if len(answer) > MAX_TEXT_BYTES:
            os._exit(TOO_LARGE)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(answer)


@lru_cache(maxsize=16)
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template.removeprefix("\ufeff"))  # a byte order mark


class _GenerationTag(Extension):
    """{% generation %}: marks text of the model for training; without effect on the text."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As Jinja's filter, without escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


if __name__ == "__main__":
    answer_all(Connection(int(sys.argv[1])))
