"""The server as a process: it says where it is, ends when it is told to, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import errno
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from functools import partial
from typing import Any

import pytest

from nanoengine.builder import Built
from nanoengine.errors import InvalidConfig
from nanoengine.serve.cli import main
from nanoengine.serve.server import serve as serve_module
from tests.forks import IS_LINUX, Forked
from tests.serve.aio.toys import PATIENCE
from tests.serve.server.events import read_events
from tests.serve.server.running import JSON, until

CUT = "the server is shutting down, and the answer is not whole: ask again"
HANGUP = "import signal; signal.signal(signal.SIGHUP, signal.{})"
"""As whoever starts the server has it: whoever runs the tests may ignore it."""

SMALL = ["--dtype", "float32", "--device", "cpu", "--num-kv-blocks", "600"]


class Process:
    """A server that was started by its command: a fork where Linux is, else a new interpreter.

    Args:
        before: what is done first in its interpreter, in Python.
    """

    def __init__(self, *arguments: str, before: str = "pass"):
        program = f"import sys; {before}; from nanoengine.serve.cli import main; sys.exit(main(sys.argv[1:]))"
        command = ["-c", program, "serve", "demo", *SMALL, *arguments]
        said, log = os.pipe()
        self.log = os.fdopen(said)
        self.process: Any
        if not IS_LINUX:
            self.process = subprocess.Popen([sys.executable, *command], stderr=log, start_new_session=True)
        else:
            self.process = Forked(command, streams=(None, 1, log), own_session=True)
        os.close(log)
        self.where = self._address()

    def _address(self) -> str:
        said = []
        for line in self.log:
            said.append(line)
            if found := re.search(r"serving demo at (\S+)", line):
                return found[1]
        raise AssertionError("".join(said))

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.where.removeprefix("http://"), timeout=PATIENCE)

    def open(self, method: str, path: str, **body: Any) -> http.client.HTTPResponse:
        return self.later(path, method, **body).getresponse()

    def later(self, path: str, method: str = "POST", **body: Any) -> http.client.HTTPConnection:
        """A connection on which this was asked."""
        connection = self.connect()
        connection.request(method, path, json.dumps(body) if body else None, JSON if body else {})
        return connection

    def stream(self, max_tokens: int) -> http.client.HTTPResponse:
        """A completion that was begun: its first chunk is there."""
        body = {"prompt": "def f(", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        response = self.open("POST", "/v1/completions", **body)
        assert response.fp.peek(1)
        return response

    def tell(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def check_gone(self) -> None:
        """It has ended as it should, and so have all processes that it began."""
        assert self.process.wait(PATIENCE) == 0
        with pytest.raises(ProcessLookupError):
            os.killpg(self.process.pid, 0)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


def end_of(response: http.client.HTTPResponse) -> str:
    """Why a stream has ended, if it has come to its proper end."""
    *_, last = read_events(response.read())
    return str(last["error"]["message"] if "error" in last else last["choices"][0]["finish_reason"])


def test_sigterm_lets_answers_end_and_a_second_one_does_not_wait(processes: list[Process]) -> None:
    """The end of the terminal does nothing to a server that was started with nohup."""
    processes.append(server := Process("--port", "0", "--shutdown-timeout", "1000", before=HANGUP.format("SIG_IGN")))
    server.tell(signal.SIGHUP)
    short, endless = server.stream(20), server.stream(4000)
    server.tell(signal.SIGTERM)
    until(lambda: server.open("GET", "/health").status == 503)
    assert json.loads(server.open("GET", "/health").read()) == {"status": "the server is shutting down"}
    refused = server.open("POST", "/v1/completions", prompt="a")
    assert (refused.status, refused.headers["retry-after"]) == (503, "1")
    assert end_of(short) == "length"
    server.tell(signal.SIGTERM)
    assert CUT in end_of(endless)
    server.check_gone()


def test_ctrl_c_with_no_time_to_end_aborts(processes: list[Process]) -> None:
    options = ("--port", "0", "--shutdown-timeout", "0", "--no-access-log")
    processes.append(server := Process(*options))
    endless = server.stream(4000)
    asked: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "x"}]}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/messages": {**asked, "stream": True, "max_tokens": 4000, "temperature": 0},
        "/v1/responses": {"input": "x", "stream": True, "max_output_tokens": 4000, "temperature": 0},
        "/api/chat": {**asked, "options": {"num_predict": 4000, "temperature": 0}},
    }
    others = [server.open("POST", path, **body) for path, body in bodies.items()]
    whole = server.later("/v1/chat/completions", **asked, ignore_eos=True)
    assert all(other.fp.peek(1) for other in others)
    server.tell(signal.SIGINT)
    assert CUT in end_of(endless)
    ends = [json.loads(own.read().strip().splitlines()[-1].removeprefix(b"data: ")) for own in others]
    assert [own.get("type") for own in ends] == ["error", "response.failed", None]
    assert ends[0]["error"] == {"type": "overloaded_error", "message": CUT}
    assert ends[1]["response"]["error"] == {"code": "server_error", "message": CUT}
    assert ends[2] == {"error": CUT}
    assert (whole.getresponse().status, whole.close()) == (503, None)
    server.check_gone()


HANGS = "import time; from nanoengine.core.llm_engine import LLMEngine; LLMEngine.step = lambda self: time.sleep(1e6)"
SOON = "import nanoengine.serve.server.serve as serve; serve.HARD_END_SECONDS = 0.1"


def test_a_step_that_never_ends_does_not_keep_the_process(processes: list[Process]) -> None:
    """The end of the terminal is the end of the server where nobody has said otherwise."""
    before = f"{HANGS}; {SOON}; {HANGUP.format('SIG_DFL')}"
    processes.append(server := Process("--port", "0", "--shutdown-timeout", "0", before=before))
    connection = server.connect()
    connection.request("POST", "/v1/completions", json.dumps({"prompt": "a"}), JSON)
    until(lambda: json.loads(server.open("GET", "/load").read())["server_load"] == 1)
    server.tell(signal.SIGHUP)
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())["error"]["message"]) == (503, CUT)
    assert server.process.wait(PATIENCE) == 1
    assert "the process ends as it stands" in server.log.read()


# ---- where it cannot listen


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command says when it ends at once."""
    assert main(["serve", "demo", *arguments]) == 1
    said = capsys.readouterr().err
    assert said.startswith("nanoengine: InvalidConfig: ")
    assert "Traceback" not in said
    return said


def test_a_port_that_is_taken_is_said_so_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = refusal(capsys, "--port", str(port))
    assert f"127.0.0.1', port {port}" in said
    assert "in use" in said


def test_nobody_takes_the_port_while_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]

    def load(*_: Any) -> Built:
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
        raise InvalidConfig("enough was seen")

    monkeypatch.setattr("nanoengine.serve.server.serve.build_engine", load)
    assert "enough was seen" in refusal(capsys, "--port", str(port))


@pytest.mark.parametrize(
    ("option", "values"), [("--host", ["no.such.host.invalid", "a..b", "203.0.113.7"]), ("--port", ["70000"])]
)
def test_what_cannot_work_is_said_at_once(capsys: pytest.CaptureFixture[str], option: str, values: list[str]) -> None:
    for value in values:
        said = refusal(capsys, option, value)
        assert option.removeprefix("--") in said or "cannot listen" in said


def test_without_descriptors_the_log_gets_one_line(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(partial(serve_module._log_once, []))
    for _ in range(1000):
        loop.call_exception_handler({"message": "accept", "exception": OSError(errno.EMFILE, "Too many open files")})
    loop.close()
    assert len(caplog.records) == 1
    assert "ulimit" in caplog.text
