"""ServerConfig: the options of the server, beside those of the engine."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any

from nanoengine.core.options import option
from nanoengine.errors import InvalidConfig, shown
from nanoengine.log import FORMATS, LEVELS
from nanoengine.sizes import told

PART_OF_A_CLIENT = 4
"""Of the bytes that requests may hold, one client may hold this part."""

BOUNDS = {
    "port": (0, 65535),
    "max_body_bytes": (1, 1 << 30),
    "max_held_body_bytes": (4, 1 << 40),
    "max_answer_bytes": (4, 1 << 40),
    "max_connections": (8, 1 << 20),
    "max_text_chars": (1, 1 << 30),
    "max_prompts": (1, 1024),
    "max_n": (1, 16384),
    "max_stop_strings": (1, 1024),
    "max_waiting": (0, 1 << 20),
    "max_waiting_tokens": (1, 1 << 40),
    "stream_interval": (1, 1 << 20),
    "text_threads": (1, 64),
    "token_cache_chars": (0, 1 << 32),
}

TLS = ("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Every option of the server.

    Args:
        host: address to listen on; 0.0.0.0 is every one of this machine.
        port: 0 takes a free one.
        served_model_name: names that requests may call the model by; answers use the first. None: the model's own.
        api_key: keys of which a request must have one ("Authorization: Bearer KEY"). None: that in the environment variable
            NANOENGINE_API_KEY, if there is one; otherwise everybody is served.
        admin_key: a key that may do all, and alone may see /view, forget the cache, abort the requests of others, and load and
            unload adapters. None: /view and the cache are for every key, and the rest is for nobody.
        separate_addresses: without keys, each address is a client whose cached prefixes no other finds, as with keys each key is.
        allowed_host: names besides localhost that a server on a loopback address may be called by ("Host: NAME"): no page of
            another site reaches it under its own name. On another address: the only names, if there are any.
        forwarded_allow_ips: addresses and networks (10.0.0.0/8) of proxies: of a request that comes from one, the client is the
            last address of its X-Forwarded-For that is none of them. "*": all, and the client is the first address.
        max_connections: connections that may be open; beyond it, those are closed whose clients have an eighth of them or more.
        max_text_chars: longest text that is split into tokens.
        max_body_bytes: longest body of a request, in bytes or as 8MiB; so the next two.
        max_held_body_bytes: most bytes of the bodies of all requests that are being answered; a client has at most a quarter.
        max_answer_bytes: most bytes that all answers may take while they are made, as estimated from what is asked for; a client
            has at most a quarter.
        max_prompts: most prompts in one call.
        max_n: most completions of a prompt.
        max_stop_strings: most strings that end a completion.
        max_waiting: sequences that may wait for their turn; beyond it requests are refused with 503.
        max_waiting_tokens: tokens of the sequences that have none yet, their prompts and what they may get; beyond it requests
            are refused with 503 while any sequence waits.
        max_step_seconds: a step that takes longer hangs: /health and new requests get 503 until it ends.
        request_timeout: seconds that a request may take, waiting included. None: as long as it takes.
        shutdown_timeout: seconds that running requests are given to end after SIGTERM or Ctrl-C; then they are aborted.
        stream_interval: tokens that a streamed chunk has at least, but for the first and the last of an answer.
        text_threads: threads that render chats and encode and decode text; for requests of at most 8 KiB there are as many more.
        token_cache_chars: characters of messages whose tokens are remembered; a message counts for 64 more, and for its tokens.
        cors_origin: origins whose pages may call the server. None: none but its own.
        page: whether the page at / is served.
        access_log: whether each request is logged, in one line.
        log_level: debug, info, warning or error: the lowest that is logged.
        log_format: of the log on standard error: text, lines with a time and a level; or json, an object in each line.
        ssl_certfile: PEM file of a certificate and of those that sign it: the server speaks https.
        ssl_keyfile: PEM file of its key, if that is not in ssl_certfile.
        ssl_keyfile_password: that the key is encrypted with.

    Raises:
        InvalidConfig: a value that cannot work.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] | None = None
    api_key: tuple[str, ...] | None = None
    admin_key: str | None = None
    separate_addresses: bool = False
    allowed_host: tuple[str, ...] | None = None
    forwarded_allow_ips: tuple[str, ...] | None = None
    max_connections: int = 512
    max_text_chars: int = 1 << 20
    max_body_bytes: int = option(8 << 20, unit="bytes")
    max_held_body_bytes: int = option(256 << 20, unit="bytes")
    max_answer_bytes: int = option(1 << 30, unit="bytes")
    max_prompts: int = 1024
    max_n: int = 128
    max_stop_strings: int = 16
    max_waiting: int = 1024
    max_waiting_tokens: int = 1 << 24
    max_step_seconds: float = 120.0
    request_timeout: float | None = None
    shutdown_timeout: float = 10.0
    stream_interval: int = 1
    text_threads: int = 2
    token_cache_chars: int = 16 << 20
    cors_origin: tuple[str, ...] | None = None
    page: bool = True
    access_log: bool = True
    log_level: str = "info"
    log_format: str = "text"
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = None

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    @property
    def is_open(self) -> bool:
        """Whether other machines need no key."""
        return not self.is_local and self.api_key is None

    @property
    def tls(self) -> dict[str, Any]:
        """The options of uvicorn for TLS; none where the server speaks plain HTTP."""
        return {name: getattr(self, name) for name in TLS if self.ssl_certfile}

    @property
    def hosts(self) -> frozenset[str] | None:
        """Names that the server may be called by; None: any."""
        own = frozenset(self.allowed_host or ())
        if self.is_local:
            return own | {"localhost", "[::1]", "127.0.0.1", self.host}
        return own or None

    def __post_init__(self) -> None:
        for name, (least, most) in BOUNDS.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                told_most = told(most) if name.endswith("_bytes") else most
                raise InvalidConfig(f"{name} is {shown(value)}: it must be an integer from {least} to {told_most}")
        for name, words in (("log_level", LEVELS), ("log_format", FORMATS)):
            if getattr(self, name) not in words:
                raise InvalidConfig(f"{name} is {shown(getattr(self, name))}: it must be one of {', '.join(words)}")
        if self.max_body_bytes > self.max_held_body_bytes // PART_OF_A_CLIENT:
            raise InvalidConfig(
                f"max_body_bytes is {told(self.max_body_bytes)}: it must be at most a quarter of max_held_body_bytes, which is "
                f"{told(self.max_held_body_bytes)}"
            )
        # A shell writes "" for a variable that it does not know: every address, or none that has a name.
        for name in ("host", "admin_key", *TLS):
            if getattr(self, name) == "":
                raise InvalidConfig(f"{name} is empty: give one, or leave the option out")
        for name in TLS:
            if getattr(self, name) and self.ssl_certfile is None:
                raise InvalidConfig(f"{name} is given without ssl_certfile")
        for name in ("served_model_name", "api_key", "cors_origin", "allowed_host", "forwarded_allow_ips"):
            texts = getattr(self, name)
            if texts is not None and (not texts or not all(isinstance(text, str) and text for text in texts)):
                raise InvalidConfig(f"{name} is {shown(texts)}: it must be strings of at least one character, or None")
        for text in self.forwarded_allow_ips or ():
            if text != "*" and not _is_network(text):
                raise InvalidConfig(
                    f"forwarded_allow_ips holds {shown(text)}: give addresses, networks such as 10.0.0.0/8, or *"
                )
        if self.request_timeout is not None and not 0 < self.request_timeout < 1e9:
            raise InvalidConfig(f"request_timeout is {shown(self.request_timeout)}: it must be above 0, in seconds")
        if not 0 < self.max_step_seconds < 1e9:
            raise InvalidConfig(f"max_step_seconds is {shown(self.max_step_seconds)}: it must be above 0, in seconds")
        if not 0 <= self.shutdown_timeout < 1e9:
            raise InvalidConfig(f"shutdown_timeout is {shown(self.shutdown_timeout)}: it must be 0 or more, in seconds")


def _is_network(text: str) -> bool:
    try:
        return bool(ipaddress.ip_network(text))
    except ValueError:
        return False
