"""Commands that users of Ollama type and that are none of `nanoengine`: what to type instead."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from nanoengine.models.fetch import DOWNLOADS, models_folder

ADVICE = {
    "stop": "Ctrl-C stops a server or a chat, and its memory is free at once",
    "cp": "`nanoengine serve MODEL --served-model-name NAME` serves a model under another name",
    "create": "there are no Modelfiles: `nanoengine chat --help` and `nanoengine serve --help` list all options",
    "push": "nothing is uploaded from here: `hf upload ORG/NAME FOLDER` uploads a model to the hub",
    "help": "`nanoengine --help` lists all commands, `nanoengine COMMAND --help` the options of one",
}


def advice(arguments: Sequence[str]) -> str | None:
    """The command to type instead of a command line; None: it is none of Ollama's alone."""
    command, name = [*arguments, "", ""][:2]
    return _removal(name) if command == "rm" else ADVICE.get(command)


def _removal(name: str) -> str:
    if name in DOWNLOADS:
        return f"`rm {shlex.quote(str(DOWNLOADS[name].path))}` removes it"
    return f"`hf cache rm model/ORG/NAME` removes a model of the hub, `rm FILE` a file in {models_folder()}"
