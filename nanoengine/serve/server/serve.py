"""Runs the server: loads the model, listens, and on SIGTERM, SIGHUP or Ctrl-C waits for running requests, and ends."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette

from nanoengine.builder import build_engine, is_installed, read_config
from nanoengine.core.model_config import read_file
from nanoengine.errors import InvalidConfig, shown
from nanoengine.kernels.options import KernelOptions
from nanoengine.serve.aio.async_llm_engine import AsyncLLMEngine
from nanoengine.serve.server.config import TLS, ServerConfig
from nanoengine.serve.server.errors import CUT_OFF, APIError
from nanoengine.serve.server.http.app import http_settings
from nanoengine.serve.server.jobs import LAST_EVENT_SECONDS
from nanoengine.serve.server.served_model import ServedModel

logger = logging.getLogger("nanoengine.serve.server")

MAX_PEM_BYTES = 1 << 20

OTHER_DESCRIPTORS = 256
"""Open files that are no connections."""

HARD_END_SECONDS = 15.0
"""Seconds after the time for running requests, in which the rest of the server ends; what has not ended then hangs."""

SWITCH_SECONDS = 1e-3
"""Seconds for which Python lets one thread run while others wait: the engine's thread waits for other threads so long."""


def serve(model: str, options: Mapping[str, Any], config: ServerConfig) -> None:
    """Serve a model until a signal ends it.

    Args:
        model, options: see `LLM`. Where they do not say otherwise, the policy is "mixed", and a step is small enough that running
            streams go on while prompts are read.
        config: of the server.

    Raises:
        InvalidConfig: the address cannot be listened on, or the files of TLS cannot be used.
        Others: see `LLM`. No port is open before the model is loaded.
    """
    listen(config, lambda: open_serving(model, options, config), Server)


def listen(config: ServerConfig, open_: Callable[[], Any], kind: type[Server]) -> None:
    """Listen, and serve until a signal ends it.

    Args:
        config: of the server.
        open_: makes what is served, once the address is bound; see `ServedApplication`.
        kind: the class of the server.

    Raises:
        InvalidConfig: see `serve`.
    """
    over = threading.Event()
    _check_tls(config)
    with ExitStack() as stack:  # the address first: a model may take long to load for an address in use
        stack.callback(over.set)
        bound = stack.enter_context(_socket(config))
        serving = open_()
        stack.callback(serving.close)
        sys.setswitchinterval(SWITCH_SECONDS)
        gc.collect()
        gc.freeze()  # what is here now stays: to look through all of it again takes 100 ms, in which no other thread runs
        _allow_descriptors(2 * config.max_connections + OTHER_DESCRIPTORS)
        kind(serving, bound, over).run(sockets=[bound])


def open_serving(model: str, options: Mapping[str, Any], config: ServerConfig) -> ServedModel:
    """Load the model, and make the state of the endpoints; see `serve`."""
    engine_config = read_config(model, {**_defaults(options), **options})
    serving = ServedModel(lambda: build_engine(engine_config), config, model)
    serving.cache_config = {
        "cache_dtype": engine_config.of(KernelOptions).kv_cache_dtype,
        "enable_prefix_caching": str(engine_config.enable_prefix_caching),
        "gpu_memory_utilization": str(engine_config.gpu_memory_utilization),
    }
    return serving


def _check_tls(config: ServerConfig) -> None:
    files = {name: path for name in TLS if name.endswith("file") and (path := getattr(config, name))}
    password = config.ssl_keyfile_password or " "  # without one, OpenSSL asks the terminal
    try:
        for path in files.values():  # OpenSSL does not say which one is not there
            read_file(Path(path), MAX_PEM_BYTES)
        uvicorn.Config(Starlette(), log_config=None, **config.tls | {"ssl_keyfile_password": password}).load()
    except (OSError, ValueError) as error:
        named = ", ".join(f"{name}={shown(path)}" for name, path in files.items())
        raise InvalidConfig(f"TLS needs PEM files, and the password of the key; {named}: {error}") from error


def _allow_descriptors(count: int) -> None:
    """Raise the limit of open files of this process, if the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def _log_once(last: list[float], loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Without free file descriptors asyncio logs thousands of errors a second: log one line a minute."""
    error = context.get("exception")
    if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
        loop.default_exception_handler(context)
    elif not last or loop.time() - last[0] > 60:
        last[:] = [loop.time()]
        logger.error("no connection can be taken: %s; lower max_connections, or raise `ulimit -n`", error)


def _defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of the engine for a server; those of `LLM` are for batches."""
    import torch  # the engine needs it in a moment

    on_gpu = options.get("device", "auto") != "cpu" and torch.cuda.is_available()
    budget = options.get("max_num_batched_tokens") or (2048 if on_gpu else 512)
    return {
        "scheduling_policy": "mixed",
        "max_num_batched_tokens": budget,
        "long_prefill_token_threshold": max(1, budget // 2) if isinstance(budget, int) else None,
        **({"min_priority": 0} if is_installed("fairness") else {}),
    }


def _socket(config: ServerConfig) -> socket.socket:
    """The socket of the server: bound, and not listening yet."""
    try:
        if config.front_socket is not None:
            private = socket.socket(socket.AF_UNIX)
            private.bind(config.front_socket)
            os.chmod(config.front_socket, 0o600)
            return private
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        # With the protocol named, asyncio switches Nagle's algorithm off: a first token would wait 40 ms for an acknowledgement.
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((config.host, config.port))
        # Until it listens: others that bind it must fail now.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        return bound
    except (OSError, TypeError, ValueError) as error:  # of what is no name of a host, Python says the others
        raise _cannot_listen(config, error) from error


def _cannot_listen(config: ServerConfig, error: Exception) -> InvalidConfig:
    if config.front_socket is not None:
        return InvalidConfig(f"cannot listen at {shown(config.front_socket)}: {error}; set TMPDIR to a shorter path")
    return InvalidConfig(f"cannot listen at {shown(config.host)}, port {config.port}: {error}; choose other ones")


def end_hard(engine: AsyncLLMEngine | None, over: threading.Event) -> None:
    """End the process although a step or a thread for text hangs. Writing of files has other time limits."""
    over.wait(HARD_END_SECONDS)
    while engine is not None and engine.is_ending and not over.wait(0.1):
        pass
    if not over.is_set():
        logger.critical("the server has not ended in time: the process ends as it stands")
        logging.shutdown()
        os._exit(1)


class Server(uvicorn.Server):
    """uvicorn's server, which ends when its jobs have ended.

    Args:
        serving: what is served.
        bound: the socket.
        over: set when the process has closed everything.
    """

    def __init__(self, serving: Any, bound: socket.socket, over: threading.Event):
        super().__init__(self.settings(serving))
        self._over = over
        self._serving = serving
        self._socket = bound
        self._ending: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()

    def settings(self, serving: Any) -> uvicorn.Config:
        """The settings of uvicorn."""
        return http_settings(serving)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        config = self._serving.config
        asyncio.get_running_loop().set_exception_handler(partial(_log_once, []))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            await super().startup(sockets)
        except OSError as error:
            raise _cannot_listen(config, error) from error
        if self.should_exit:
            return
        if config.front_socket is not None:
            return
        address = self._socket.getsockname()
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        where = f"{'https' if config.tls else 'http'}://{host}:{address[1]}"
        chat = "" if not config.page else " (a browser shows a chat there; clients of OpenAI add /v1)"
        logger.info("serving %s at %s%s", self._serving.name, where, chat)
        if config.is_open:
            logger.warning("everybody who reaches %s is served: give --api-key, and TLS (docs/service.md)", where)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM, Ctrl-C and SIGHUP (unless `nohup` holds it off) end the server; the handlers of uvicorn would raise them again
        before everything is closed.
        """
        loop = asyncio.get_running_loop()
        is_held_off = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signals = (signal.SIGINT, signal.SIGTERM, *(() if is_held_off else (signal.SIGHUP,)))
        for number in signals:
            loop.add_signal_handler(number, self._end)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def _end(self) -> None:
        """The first call: refuse new requests, and give running ones time to end. The second call: end at once."""
        serving = self._serving
        if self._ending is None:
            logger.info("shutting down: %d calls are being answered", len(serving.jobs))
            serving.is_draining = True
            self._ending = asyncio.get_running_loop().create_task(self._drain())
        else:
            self._hurry.set()

    async def _drain(self) -> None:
        jobs = self._serving.jobs
        waits = [asyncio.ensure_future(jobs.none_left()), asyncio.ensure_future(self._hurry.wait())]
        await asyncio.wait(waits, timeout=self._serving.config.shutdown_timeout, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        problem = APIError(503, CUT_OFF)
        if count := jobs.abort(problem=problem):
            logger.info("aborted what had not ended: %d calls", count)
            with suppress(TimeoutError):
                await asyncio.wait_for(jobs.none_left(), LAST_EVENT_SECONDS)
            jobs.cut_off()
        threading.Thread(target=end_hard, args=(self._serving.engine, self._over), daemon=True).start()
        self.should_exit = True
