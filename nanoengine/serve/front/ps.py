"""`nanoengine ps`: the models of a running server, and the state of each."""

from __future__ import annotations

import json
import os
from urllib.request import ProxyHandler, Request, build_opener

from nanoengine.errors import FetchFailed

SECONDS, MOST_BYTES = 10.0, 8 << 20
"""For an answer of the server."""


def table(url: str, key: str | None = None) -> str:
    """Lines of text, one for each model.

    Args:
        url: of the server.
        key: None: that in the environment variable NANOENGINE_API_KEY, if there is one.

    Raises:
        FetchFailed: no server answers there.
    """
    key = key or os.environ.get("NANOENGINE_API_KEY", "")
    headers = {"authorization": f"Bearer {key.strip()}"} if key else {}
    try:
        opener = build_opener(ProxyHandler({}))
        with opener.open(Request(f"{url.rstrip('/')}/v1/models", headers=headers), timeout=SECONDS) as answer:
            models = json.loads(answer.read(MOST_BYTES))["data"]
        rows = [(str(model["id"]), _state(model.get("status") or {"state": "loaded"})) for model in models]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FetchFailed(f"no server of models answers at {url[:200]}: {error}; start one, or give --url") from error
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:<{width}}  {state}" for name, state in rows)


def _state(status: dict[str, object]) -> str:
    state, progress, reason = status.get("state"), status.get("progress"), status.get("reason")
    more = f" ({progress:.0%})" if isinstance(progress, float) else f": {reason}" if reason else ""
    return f"{state}{more}"
