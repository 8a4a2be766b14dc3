"""The process of one model: `python -m nanoengine.serve.front.model_server`.

The first line on its standard input is JSON: the model, the options of its engine, and those of its server. The process ends like
a server at SIGTERM when its standard input is closed, as at the end of the front.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from typing import Any

from nanoengine.errors import NanoEngineError
from nanoengine.log import show_log
from nanoengine.serve.server.config import ServerConfig
from nanoengine.serve.server.serve import serve

logger = logging.getLogger("nanoengine")


def main() -> int:
    order = json.loads(sys.stdin.readline())
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in order["config"].items()}
    config = ServerConfig(**values)
    threading.Thread(target=_end_with_front, daemon=True).start()
    show_log(config.log_level, config.log_format)
    try:
        serve(order["model"], order["options"], config)
    except Exception as error:  # the last line of the log is the reason for the clients
        logger.critical("%s: %s", type(error).__name__, error, exc_info=not isinstance(error, NanoEngineError))
        return 1
    return 0


def _end_with_front() -> None:
    while os.read(0, 1 << 12):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
