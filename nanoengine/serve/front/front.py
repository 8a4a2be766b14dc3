"""Front: the state of all endpoints of a server of several models."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest

from nanoengine.errors import InvalidConfig, did_you_mean, shown
from nanoengine.serve.front.catalogue import Source
from nanoengine.serve.front.child import END_SECONDS, Child, child_config
from nanoengine.serve.front.config import FrontConfig, duration
from nanoengine.serve.front.load_and_unload import Loader
from nanoengine.serve.front.memory_plan import MemoryPlan
from nanoengine.serve.front.model import Model
from nanoengine.serve.front.upstream import NoAnswer, request
from nanoengine.serve.server.admission.admission import quota_of_bodies
from nanoengine.serve.server.admission.work_share import WorkShare
from nanoengine.serve.server.bodies.fields import Body, Ignored
from nanoengine.serve.server.bodies.reading import SLOW_BYTES, body_of, check_media_type, parse
from nanoengine.serve.server.config import ServerConfig
from nanoengine.serve.server.errors import RETRY_AFTER, APIError
from nanoengine.serve.server.scope import CLIENT, HELD

logger = logging.getLogger("nanoengine.serve.front")

ANSWER_SECONDS = 5.0
"""In which a model's server answers about itself."""

WATCH_SECONDS, MAX_MISSES = 5.0, 3
"""Between two looks at the health of the models, and the bad ones in a row after which a process is ended."""

MAX_NAMES = 20
"""Names of models in a message."""

IGNORED = Ignored()
"""Other fields of a body are none of the front."""


class Envelope(Body, kw_only=True, forbid_unknown_fields=False):
    """What the front reads of a body; the server of the model checks it all."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None
    keep_alive: float | str | None = None
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    suffix: msgspec.Raw = msgspec.Raw()


class Front:
    """Several models, of which each is served by a process.

    Args:
        sources: the models by their names.
        config: of the server.
        limits: of the front.
        memory: whether one more model fits. None: that of this machine.

    Raises:
        InvalidConfig: a pinned model is not there, or more are pinned than can be loaded.
    """

    def __init__(
        self, sources: Mapping[str, Source], config: ServerConfig, limits: FrontConfig, memory: MemoryPlan | None = None
    ):
        self.config, self.limits = config, limits
        self.name, self.created = f"{len(sources)} models", int(time.time())
        self.work_share = WorkShare()
        self.bodies = quota_of_bodies(config)
        self.is_draining = False
        self._parts = min(limits.max_loaded_models, len(sources))
        self._folder = tempfile.TemporaryDirectory(prefix="nanoengine-")  # mode 0700
        pins, most_loaded = tuple(dict.fromkeys(limits.pin or ())), limits.max_loaded_models
        if missing := [name for name in pins if name not in sources]:
            raise InvalidConfig(f"pin names {shown(missing[0])}, no model here{did_you_mean(missing[0], sources)}")
        if len(pins) > most_loaded:
            raise InvalidConfig(f"pin names {len(pins)} models: max_loaded_models is {most_loaded}")
        models = [Model(source, source.name in pins) for source in sources.values()]
        seconds = config.shutdown_timeout + END_SECONDS
        self.loader = Loader(models, limits, seconds, memory or MemoryPlan(most_loaded), self._start)

    # ---- requests

    @property
    def jobs(self) -> range:
        """Its length is the number of requests that are being answered, as that of a server's `Jobs`."""
        return range(sum(model.num_running for model in self.loader.models))

    def check_open(self) -> None:
        """Raise APIError while the server ends."""
        if self.is_draining:
            raise APIError(503, "the server is shutting down", headers=RETRY_AFTER)

    async def body(self, http: HTTPRequest) -> bytes:
        """The body of a request. Raises APIError: it is too long."""
        holding = http.scope[HELD].enter_context(self.bodies.hold(http.scope[CLIENT]))
        return await body_of(http, self.config.max_body_bytes, holding)

    async def read(self, http: HTTPRequest) -> tuple[bytes, Envelope]:
        """The body of a request, and what of it concerns the front. Raises APIError: too long, or no JSON."""
        check_media_type(http)
        body = await self.body(http)
        if len(body) > SLOW_BYTES:
            return body, await asyncio.to_thread(parse, body, Envelope, IGNORED)
        return body, parse(body, Envelope, IGNORED)

    def model_of(self, name: str | None) -> Model:
        """The model of a name, or of that of one of its adapters. Raises APIError: none is named, or one that is not here."""
        models = self.loader.models
        if not name:
            some = ", ".join(model.name for model in models[:MAX_NAMES])
            raise APIError(400, f"model is missing: this server has several, such as {some}", "model")
        for model in models:
            if name in model.names or name.removesuffix(":latest") == model.name:
                return model
        names = [name for model in models for name in model.names]
        known = ", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")
        near = did_you_mean(name, names) or "."
        raise APIError(404, f"The model `{name[:80]}` does not exist. Valid names: {known}{near}", "model")

    def keep_alive_of(self, envelope: Envelope) -> float | None:
        """Seconds, as Ollama's clients send it; None: nothing is sent. Raises APIError."""
        try:
            return None if envelope.keep_alive is None else duration(envelope.keep_alive)
        except InvalidConfig as error:
            raise APIError(400, str(error), "keep_alive") from error

    # ---- processes

    async def _start(self, model: Model, options: dict[str, Any]) -> Child:
        socket = Path(self._folder.name) / f"{self.loader.models.index(model)}.socket"
        config = child_config(self.config, model.name, str(socket), self._parts)
        return await Child.start(model.source.model, options, config, lambda fields: self._log(model.name, fields))

    def _log(self, name: str, fields: dict[str, Any]) -> None:
        """A line of a process' log, with the name of its model."""
        line = json.dumps({**fields, "model": name})
        if self.config.log_format == "text":
            line = f"{fields.get('time', '')} {fields['level'].upper()} {name}: {fields['message']}".strip()
            line += f"\n{fields['exception']}" if "exception" in fields else ""
        print(line, file=sys.stderr, flush=True)

    async def ask(self, target: str, models: list[Model] | None = None) -> dict[Model, tuple[int, bytes]]:
        """The status and the body of the answer of each loaded model, or of those in `models`, to a GET; without those whose
        servers do not answer in ANSWER_SECONDS.
        """
        answers: dict[Model, tuple[int, bytes]] = {}

        async def ask(model: Model, child: Child) -> None:
            with contextlib.suppress(NoAnswer, TimeoutError):
                async with asyncio.timeout(ANSWER_SECONDS), request(child.socket, "GET", target) as answer:
                    answers[model] = answer.status, await answer.body()

        pairs = self.loader.in_memory.items()
        await asyncio.gather(*(ask(*pair) for pair in pairs if pair[0].is_loaded and (not models or pair[0] in models)))
        return {model: answers[model] for model in self.loader.models if model in answers}

    async def run(self) -> None:
        """Load pinned models, unload idle ones, and watch all processes."""
        tasks = [self.loader.loaded(model) for model in self.loader.models if model.is_pinned]
        pinned = asyncio.gather(*tasks, return_exceptions=True)  # a load that fails is in the log
        await asyncio.gather(self._watch(), self.loader.unload_idle(), pinned)

    async def _watch(self) -> None:
        """Kill processes whose servers do not answer, or say that they do not serve, several times in a row: their models are
        loaded again by the next request.
        """
        misses = Counter[Child]()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            answers, pairs = await self.ask("/health"), self.loader.in_memory.items()
            ill = {child: one for one, child in pairs if one.is_loaded and answers.get(one, (0,))[0] != HTTPStatus.OK}
            misses = Counter({child: misses[child] + 1 for child in ill})
            for child in [child for child, count in misses.items() if count >= MAX_MISSES]:
                logger.error("%s: its server does not answer, or does not serve: it is ended", ill[child].name)
                child.kill()

    def hurry(self) -> None:
        """A second signal: all models abort what runs."""
        for child in self.loader.in_memory.values():
            child.terminate()

    def close(self) -> None:
        """The server has ended all processes before; one that is left ends when its standard input does."""
        self._folder.cleanup()
