"""The server of `bench.py http --mock`: all of nanoengine's but the engine, whose stand-in says the same token over and over.

It keeps a bounded number of steps ahead of the event loop, as an engine would that is faster than its readers.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import uvicorn

from nanoengine.builder import Built
from nanoengine.engine.door import Door
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.request import Request
from nanoengine.engine.request_stream import RequestStream
from nanoengine.engine.scheduler import Scheduler
from nanoengine.models.description import describe
from nanoengine.models.names import find_model
from nanoengine.outputs import Delta
from nanoengine.sampling_params import SamplingParams
from nanoengine.server.app import make_app
from nanoengine.server.config import ServerConfig
from nanoengine.server.http import BoundedHTTP
from nanoengine.server.serving import Serving

MOST_STEPS_AHEAD = 16
MAX_MODEL_LEN = 1 << 20


class MockEngine:
    """Has the calls of `AsyncLLMEngine` that a completion makes."""

    error = None
    num_waiting = 0

    def __init__(self, door: Door):
        self._door = door
        self._new: deque[RequestStream] = deque()
        self._wake = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def make_request(self, prompt: list[int], params: SamplingParams, request_id: str, **options: Any) -> Request:
        return self._door.request(request_id, prompt, params, **options)

    def submit(self, request: Request, interval: int | None = 1) -> RequestStream:
        stream = RequestStream(request, asyncio.get_running_loop(), interval)
        self._new.append(stream)
        self._wake.set()
        return stream

    def cancel(self, stream: RequestStream) -> None:
        """Nobody hangs up here."""

    def _run(self) -> None:
        left: dict[RequestStream, int] = {}
        ahead: deque[threading.Event] = deque()
        while True:
            while self._new:
                stream = self._new.popleft()
                left[stream] = stream.request.params.max_tokens or 1
            if not left:
                self._wake.wait()
                self._wake.clear()
                continue
            news = []
            for stream in list(left):
                left[stream] -= 1
                reason = None if left[stream] else "length"
                news.append((stream, [Delta(0, " token", [17], None, cast(Any, reason), None)], not left[stream]))
                if reason:
                    del left[stream]
            taken = threading.Event()
            news[0][0].loop.call_soon_threadsafe(_deliver, news, taken)
            ahead.append(taken)
            if len(ahead) > MOST_STEPS_AHEAD:
                ahead.popleft().wait()


def _deliver(news: list[tuple[RequestStream, list[Delta], bool]], taken: threading.Event) -> None:
    for stream, deltas, is_over in news:
        stream.deliver(deltas, is_over)
    taken.set()


def main() -> None:
    model = describe(find_model("demo"))
    scheduler = cast(Scheduler, SimpleNamespace(max_model_len=MAX_MODEL_LEN, max_num_seqs=1024))
    door = Door(scheduler, model.tokenizer, model.config.vocab_size, tuple(model.eos_token_ids))
    idle = SimpleNamespace(scheduler=scheduler, vocab_size=model.config.vocab_size, has_unfinished=False, close=int)
    engine = cast(LLMEngine, idle)
    built = Built(engine, model.config, model.tokenizer, {})
    serving = Serving(lambda: built, ServerConfig(access_log=False, max_waiting=1 << 20), "demo")
    serving.engine = cast(Any, MockEngine(door))
    own = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    own.bind(("127.0.0.1", 0))
    print(own.getsockname()[1], flush=True)
    settings = uvicorn.Config(
        make_app(serving), http=BoundedHTTP, ws="none", lifespan="off", log_config=None, access_log=False
    )
    uvicorn.Server(settings).run(sockets=[own])


if __name__ == "__main__":
    main()
