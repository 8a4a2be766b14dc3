"""The server of `bench.py http --mock`: all of nanoengine's but the engine, whose stand-in says the same token over and over.

It keeps a bounded number of steps ahead of the event loop, as an engine would that is faster than its readers.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

import uvicorn

from nanoengine.aio.request_stream import Delta, RequestStream
from nanoengine.builder import Built, read_config
from nanoengine.core.block_manager import BlockManager
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.scheduler import Scheduler
from nanoengine.core.sequence import Request
from nanoengine.models.description import describe
from nanoengine.models.names import find_model
from nanoengine.sampling.params import SamplingParams
from nanoengine.server.app import http_settings
from nanoengine.server.config import ServerConfig
from nanoengine.server.serving import Serving

MOST_STEPS_AHEAD = 16
MAX_MODEL_LEN = 1 << 20


class MockEngine:
    """Has the calls of `AsyncLLMEngine` that a completion makes."""

    error = None
    num_waiting = 0

    def __init__(self, engine: LLMEngine):
        self._engine = engine  # checks requests, and does no step
        self._new: deque[RequestStream] = deque()
        self._wake = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def make_request(self, prompt: list[int], params: SamplingParams, request_id: str, **options: Any) -> Request:
        return self._engine.make_request(prompt, params, request_id, **options)

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
                is_over = not left[stream]
                news.append((stream, [Delta(0, " token", [17], None, "length" if is_over else None, None)], is_over))
                if is_over:
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
    executor: Any = None
    engine = LLMEngine(
        Scheduler(BlockManager(1, 16), max_num_seqs=1, max_num_batched_tokens=1),
        executor,
        model.tokenizer,
        vocab_size=model.config.vocab_size,
        max_model_len=MAX_MODEL_LEN,
    )
    parts = {"models": SimpleNamespace(default_sampling={}), "observability": SimpleNamespace(metrics=None)}
    built = Built(read_config("demo", {}), engine, model.tokenizer, parts)
    serving = Serving(lambda: built, ServerConfig(access_log=False, max_waiting=1 << 20), "demo")
    mock: Any = MockEngine(engine)
    serving.engine = mock
    own = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    own.bind(("127.0.0.1", 0))
    own.listen(1024)  # who reads the port connects at once
    print(own.getsockname()[1], flush=True)
    uvicorn.Server(http_settings(serving)).run(sockets=[own])


if __name__ == "__main__":
    main()
