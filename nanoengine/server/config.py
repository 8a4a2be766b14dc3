"""ServerConfig: what whoever runs the server chooses, beside the options of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from nanoengine.core.config import BYTES
from nanoengine.errors import InvalidConfig, shown

BOUNDS = {
    "port": (0, 65535),
    "max_body_bytes": (1, 1 << 30),
    "max_prompts": (1, 1024),
    "max_n": (1, 16384),
    "max_stop_strings": (1, 1024),
    "max_waiting": (0, 1 << 20),
    "stream_interval": (1, 1 << 20),
    "text_threads": (1, 64),
    "token_cache_chars": (0, 1 << 32),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Every option of the server.

    Args:
        host: address to listen on; 0.0.0.0 is every one of this machine.
        port: 0 takes a free one.
        uds: path of a Unix socket, in place of host and port.
        served_model_name: names that requests may call the model by; answers use the first. None: the model's own.
        api_key: keys of which a request must have one ("Authorization: Bearer KEY"). None: that in the environment variable
            NANOENGINE_API_KEY, if there is one; otherwise everybody is served.
        max_body_bytes: longest body of a request, in bytes or as 8MiB.
        max_prompts: most prompts in one call.
        max_n: most completions of a prompt.
        max_stop_strings: most strings that end a completion.
        max_waiting: sequences that may wait for their turn; beyond it requests are refused with 503.
        request_timeout: seconds that a request may take, waiting included. None: as long as it takes.
        shutdown_timeout: seconds that running requests are given to end after SIGTERM or Ctrl-C; then they are aborted.
        stream_interval: tokens that a streamed chunk has at least, but for the first and the last of an answer.
        text_threads: threads that render chats and encode and decode text.
        token_cache_chars: characters of messages whose tokens are remembered.
        cors_origin: origins whose pages may call the server. None: none but its own.
        page: whether the page at / is served.
        access_log: whether each request is logged, in one line.

    Raises:
        InvalidConfig: a value that cannot work.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    served_model_name: tuple[str, ...] | None = None
    api_key: tuple[str, ...] | None = None
    max_body_bytes: int = field(default=8 << 20, metadata=BYTES)
    max_prompts: int = 1024
    max_n: int = 128
    max_stop_strings: int = 16
    max_waiting: int = 1024
    request_timeout: float | None = None
    shutdown_timeout: float = 10.0
    stream_interval: int = 1
    text_threads: int = 2
    token_cache_chars: int = 16 << 20
    cors_origin: tuple[str, ...] | None = None
    page: bool = True
    access_log: bool = True

    def __post_init__(self) -> None:
        for name, (least, most) in BOUNDS.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise InvalidConfig(f"{name} is {shown(value)}: it must be an integer from {least} to {most}")
        # A shell writes "" for a variable that it does not know: every address, or none that has a name.
        for name in ("host", "uds"):
            if getattr(self, name) == "":
                raise InvalidConfig(f"{name} is empty: give one, or leave the option out")
        for name in ("served_model_name", "api_key", "cors_origin"):
            texts = getattr(self, name)
            if texts is not None and (not texts or not all(isinstance(text, str) and text for text in texts)):
                raise InvalidConfig(f"{name} is {shown(texts)}: it must be strings of at least one character, or None")
        if self.request_timeout is not None and not 0 < self.request_timeout < 1e9:
            raise InvalidConfig(f"request_timeout is {shown(self.request_timeout)}: it must be above 0, in seconds")
        if not 0 <= self.shutdown_timeout < 1e9:
            raise InvalidConfig(f"shutdown_timeout is {shown(self.shutdown_timeout)}: it must be 0 or more, in seconds")
