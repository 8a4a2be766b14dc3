"""The log: lines with a time and a level, or of JSON, in every process that belongs to a server."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from datetime import datetime
from multiprocessing.connection import Connection

import pytest

from nanoengine.log import Lines, child_log_arguments
from nanoengine.scale.worker.child import start_child

PATIENCE = 60.0


def record_of(message: str, *args: object) -> logging.LogRecord:
    try:
        raise ValueError("one\ntwo")
    except ValueError:
        return logging.LogRecord("nanoengine.x", logging.WARNING, "", 0, message, args, sys.exc_info())


def test_lines_have_a_time_and_a_level() -> None:
    first, *rest = Lines("text").format(record_of("%d of it", 2)).splitlines()
    time, line = first.split(" ", 1)
    assert datetime.fromisoformat(time).tzinfo is not None
    assert line == "WARNING nanoengine.x: 2 of it"
    assert rest[0].startswith("Traceback")


def test_a_line_of_json_has_all_of_it_and_names_of_arguments() -> None:
    line = Lines("json").format(record_of('%(path)s\n"', {"path": "/é", "status": 200}))
    assert "\n" not in line
    found = json.loads(line)
    assert datetime.fromisoformat(found.pop("time")).tzinfo is not None
    assert found.pop("exception").endswith("ValueError: one\ntwo")
    assert found.pop("pid") > 0
    expected = {"level": "warning", "logger": "nanoengine.x", "message": '/é\n"', "path": "/é", "status": 200}
    assert found == expected


@pytest.mark.parametrize(
    ("level", "said"), [("debug", ["info", "warning", "critical", "critical"]), ("error", ["critical", "critical"])]
)
def test_what_nobody_has_caught_is_logged_too(level: str, said: list[str]) -> None:
    program = f"""
import logging, threading
from nanoengine.log import show_log
show_log("{level}", "json")
logging.getLogger("nanoengine").info("ours")
logging.getLogger("other").info("of no interest")
logging.getLogger("other").warning("theirs")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
{{}}["none"]
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["level"] for line in lines] == said
    assert "ZeroDivisionError" in lines[-2]["exception"]
    assert "KeyError" in lines[-1]["exception"]


def test_processes_that_are_started_log_as_this_one(capfd: pytest.CaptureFixture[str]) -> None:
    """Here a worker and a replica that are told nonsense."""
    assert child_log_arguments() == ("warning", "plain")
    handler, logger = logging.StreamHandler(), logging.getLogger("nanoengine")
    handler.setFormatter(Lines("json"))
    logger.addHandler(handler)
    try:
        children = [start_child(f"nanoengine.scale.{name}.process") for name in ("worker", "replicas")]
    finally:
        logger.removeHandler(handler)
    for process, own in children:
        with Connection(own.detach()) as connection:
            connection.send_bytes(b"no pickle")
            assert process.wait(PATIENCE) == 1
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [line["pid"] for line in lines] == [process.pid for process, _ in children]
    for line in lines:
        assert line["level"] == "critical"
        assert re.search("UnpicklingError", line["exception"])
