"""TemplateClient: renders chat templates in a process with limits of time and memory."""

from __future__ import annotations

import marshal
import signal
import sys
from typing import Any

from nanoengine.child_process import ChildProcess, ProcessEnded
from nanoengine.errors import InvalidPrompt
from nanoengine.models import template_process as limits

COMMAND = [sys.executable, "-I", limits.__file__]

MAX_WAIT = 60.0
"""Seconds until an answer must be there."""

OTHER = "the limit of a text: send less, or use another template by the option chat_template"
DEATHS: dict[int | None, str] = {
    -signal.SIGPROF: f"takes more than {limits.MAX_SECONDS:g} s of a CPU, {OTHER}",
    limits.TOO_LARGE: f"takes more than {limits.MAX_BYTES >> 20} MiB, or makes more than {limits.MAX_TEXT_BYTES >> 20}, {OTHER}",
}
"""Faults of a template, by the exit status of its process."""


class TemplateClient:
    """Any thread may call it; one text is rendered at a time. The process starts with the first, and ends with this object."""

    def __init__(self) -> None:
        self.process = ChildProcess(COMMAND, max_wait=MAX_WAIT, max_answer_bytes=limits.MAX_TEXT_BYTES)

    def render(self, template: str, values: Any) -> str:
        """The text of a template with variables of JSON's types; None: only compile the template.

        Raises:
            InvalidPrompt: the template refuses the values, with its message, is broken, or exceeds its limits.
        """
        try:
            answer = self.process.ask(marshal.dumps((template, values)))
        except ProcessEnded as error:
            why = DEATHS.get(error.status, f"was not rendered, its process {error}: ask again")
            raise InvalidPrompt("", f"the chat template {why}") from error
        text = answer[1:].decode(errors="surrogatepass")
        if answer[:1] != limits.OK:
            raise InvalidPrompt("", f"the chat template refused the messages: {text}")
        return text
