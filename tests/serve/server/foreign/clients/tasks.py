"""Agents of others, each of which does one task on this server: a command is run, and its output is in the answer.

Usage: python tasks.py FOLDER TABLE [NAME...], where FOLDER has node_modules with @anthropic-ai/claude-code, @openai/codex and
opencode-ai, and rows are added to TABLE. The model is a script (`Scripted`): it sees in the prompt which tools it has, calls the
one that runs commands, and answers when it sees what came of it. So what is tested is all between the agent and the model.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.serve.server.parrot import Parrot, build, save_tokenizer
from tests.serve.server.running import Server
from tests.support import byte_tokenizer

TEMPLATE = (
    "{# <tool_call> #}{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}{{ message.tool_calls | tojson if message.tool_calls }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)
COMMAND = "echo $((4700 + 11))"
TASK = f"Run `{COMMAND}` and tell me the number."
ANSWER = "The number is 4711."
SHELLS: dict[str, dict[str, Any]] = {
    "Bash": {"command": COMMAND, "description": "Add"},
    "exec_command": {"cmd": COMMAND},
    "bash": {"command": COMMAND, "description": "Add"},
}
"""Tools that run commands, by their names."""


TOKENIZER: Any = byte_tokenizer()


class Scripted(Parrot):
    """Says what `reply_to` has for a prompt."""

    def __init__(self, eos: int, poison: int):
        super().__init__(eos, poison)
        self.replies: dict[int, list[int]] = {}

    def _next(self, row: int, position: int) -> int:
        own = self.rows[row]
        place = position - own.num_prompt
        if place == 0:
            prompt = TOKENIZER.decode([token for token in own.token_ids if token < self.eos])
            self.replies[row] = TOKENIZER.encode(reply_to(prompt))
        reply = self.replies[row]
        return reply[place] if place < len(reply) else self.eos


def reply_to(prompt: str) -> str:
    if "4711" in prompt:
        return ANSWER
    for name, arguments in SHELLS.items():
        if f'"name": "{name}"' in prompt:
            return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    return "A number"  # some agents ask for a title beside


def claude(bin: Path, home: Path, url: str) -> tuple[list[str], dict[str, str]]:  # noqa: ARG001 - as the others
    names = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_SMALL_FAST_MODEL")
    env = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    return [str(bin / "claude"), "-p", TASK, "--allowedTools", "Bash"], env | dict.fromkeys(names, "scripted")


def codex(bin: Path, home: Path, url: str) -> tuple[list[str], dict[str, str]]:
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(
        'model = "scripted"\nmodel_provider = "own"\n[model_providers.own]\nname = "own"\n'
        f'base_url = "{url}/v1"\nwire_api = "responses"\nenv_key = "KEY"\nrequest_max_retries = 0\nstream_max_retries = 0\n'
    )
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return [str(bin / "codex"), "exec", *options, TASK], {"KEY": "none"}


def opencode(bin: Path, home: Path, url: str) -> tuple[list[str], dict[str, str]]:
    own = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {"scripted": {"name": "scripted"}},
    }
    config = {"provider": {"own": own}, "model": "own/scripted", "small_model": "own/scripted", "autoupdate": False}
    (home / "work" / "opencode.json").write_text(json.dumps(config))
    env = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}
    return [str(bin / "opencode"), "run", "--auto", "--model", "own/scripted", TASK], env


AGENTS = {"claude": claude, "codex": codex, "opencode": opencode}


def main(folder: Path, table: Path, names: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    failed = 0
    with tempfile.TemporaryDirectory() as place:
        tokenizer = save_tokenizer(Path(place), TEMPLATE)
        built = build(tokenizer, num_blocks=200_000, max_model_len=400_000, toy=Scripted)
        server = Server(built, "scripted")
        try:
            for name in names or AGENTS:
                with tempfile.TemporaryDirectory() as home:
                    (Path(home) / "work").mkdir()
                    command, env = AGENTS[name](folder / "node_modules" / ".bin", Path(home), server.url)
                    env |= {"PATH": os.environ["PATH"], "HOME": home}
                    done = subprocess.run(
                        command,
                        env=env,
                        cwd=Path(home) / "work",
                        stdin=subprocess.DEVNULL,
                        capture_output=True,
                        text=True,
                        timeout=180,
                    )
                    is_ok = done.returncode == 0 and ANSWER in done.stdout
                    failed += not is_ok
                    if not is_ok:
                        print(f"{name}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
                    row = f"| {name} | a task with a tool | {'passed' if is_ok else 'FAILED'} |"
                    print(row, flush=True)
                    with table.open("a") as file:
                        file.write(row + "\n")
        finally:
            server.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]), sys.argv[3:]))
