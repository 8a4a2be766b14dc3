"""ServerConfig: the options of the server, beside those of the engine."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any

from nanoengine.core.options import check, option
from nanoengine.errors import InvalidConfig, shown
from nanoengine.log import FORMATS, LEVELS
from nanoengine.sizes import format_bytes

PART_OF_A_CLIENT = 4
"""A client may hold 1 / PART_OF_A_CLIENT of the bytes of all requests."""

TLS = ("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Every option of the server.

    Args:
        host: address to listen on; 0.0.0.0 is every one of this machine.
        port: 0 takes a free one.
        served_model_name: names that requests may call the model by; answers use the first. None: the name of the model.
        api_key: keys of which a request must have one ("Authorization: Bearer KEY"). None: that in the environment variable
            NANOENGINE_API_KEY, if there is one; otherwise everybody is served.
        admin_key: a key that may do all, and alone may see /view, forget the cache, abort the requests of others, and load and
            unload adapters. None: /view and the cache are for every key, and the rest is for nobody.
        separate_addresses: without keys, each address is a client whose cached prefixes no other finds, as with keys each key is.
        allowed_host: names besides localhost that a server on a loopback address may be called by ("Host: NAME"): no page of
            another site reaches it under a name of that site. On another address: the only names, if there are any.
        forwarded_allow_ips: addresses and networks (10.0.0.0/8) of proxies: of a request that comes from one, the client is the
            last address of its X-Forwarded-For that is none of them. "*": all, and the client is the first address.
        max_connections: connections that may be open; beyond it, those are closed whose clients have an eighth of them or more.
        max_text_chars: longest text that is split into tokens.
        max_body_bytes: longest body of a request, in bytes or as 8MiB; so the next two.
        max_held_body_bytes: most bytes of the bodies of all requests that are being answered; a client has at most a quarter.
        max_answer_bytes: most bytes that all answers may take while they are made, as estimated from the request; a client
            has at most a quarter.
        max_prompts: most prompts in one call.
        max_n: most completions of a prompt.
        max_stop_strings: most strings that end a completion.
        max_waiting: sequences that may wait for their turn; beyond it requests are refused with 503.
        max_waiting_tokens: tokens of the sequences that have none yet, their prompts and what they may get; beyond it requests
            are refused with 503 while any sequence waits.
        max_step_seconds: a step that takes longer hangs: /health and new requests get 503 until it ends.
        request_timeout: seconds that a request may take, waiting included. None: as long as it takes.
        shutdown_timeout: seconds until running requests must have ended, after SIGTERM or Ctrl-C; then they are aborted.
        stream_interval: tokens that a streamed chunk has at least, but for the first and the last of an answer.
        text_threads: threads that render chats and encode and decode text; for requests of at most 8 KiB there are as many more.
        token_cache_chars: characters of messages whose tokens are remembered; a message counts for 64 more, and for its tokens.
        cors_origin: origins whose pages may call the server. None: only the server's page.
        page: whether the page at / is served.
        access_log: whether each request is logged, in one line.
        log_level: debug, info, warning or error: the lowest that is logged.
        log_format: of the log on standard error: text, lines with a time and a level; or json, an object in each line.
        ssl_certfile: PEM file of a certificate and of those that sign it: the server speaks https.
        ssl_keyfile: PEM file of its key, if that is not in ssl_certfile.
        ssl_keyfile_password: that the key is encrypted with.
        front_socket: path of a Unix socket to listen on, for the front of several models alone: it has checked its clients. No
            option of the command line.

    Raises:
        InvalidConfig: a value that cannot work.
    """

    host: str = "127.0.0.1"
    port: int = option(8000, 0, 65535)
    served_model_name: tuple[str, ...] | None = None
    api_key: tuple[str, ...] | None = None
    admin_key: str | None = None
    separate_addresses: bool = False
    allowed_host: tuple[str, ...] | None = None
    forwarded_allow_ips: tuple[str, ...] | None = None
    max_connections: int = option(512, 8, 1 << 20)
    max_text_chars: int = option(1 << 20, 1, 1 << 30)
    max_body_bytes: int = option(8 << 20, 1, 1 << 30, unit="bytes")
    max_held_body_bytes: int = option(256 << 20, 4, 1 << 40, unit="bytes")
    max_answer_bytes: int = option(1 << 30, 4, 1 << 40, unit="bytes")
    max_prompts: int = option(1024, 1, 1024)
    max_n: int = option(128, 1, 16384)
    max_stop_strings: int = option(16, 1, 1024)
    max_waiting: int = option(1024, 0, 1 << 20)
    max_waiting_tokens: int = option(1 << 24, 1, 1 << 40)
    max_step_seconds: float = option(120.0, 0, 1e9, above=True)
    request_timeout: float | None = option(None, 0, 1e9, above=True)
    shutdown_timeout: float = option(10.0, 0, 1e9)
    stream_interval: int = option(1, 1, 1 << 20)
    text_threads: int = option(2, 1, 64)
    token_cache_chars: int = option(16 << 20, 0, 1 << 32)
    cors_origin: tuple[str, ...] | None = None
    page: bool = True
    access_log: bool = True
    log_level: str = option("info", choices=LEVELS)
    log_format: str = option("text", choices=FORMATS)
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = None
    front_socket: str | None = None

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
        names = frozenset(map(str.lower, self.allowed_host or ()))
        if self.is_local:
            return names | {"localhost", "[::1]", "127.0.0.1", self.host}
        return names or None

    def __post_init__(self) -> None:
        check(self)
        if self.max_body_bytes > self.max_held_body_bytes // PART_OF_A_CLIENT:
            raise InvalidConfig(
                f"max_body_bytes is {format_bytes(self.max_body_bytes)}: it must be at most a quarter of max_held_body_bytes,"
                f" which is {format_bytes(self.max_held_body_bytes)}"
            )
        # A shell writes "" for a variable that it does not know: every address, or none that has a name.
        for name in ("host", *TLS):
            if getattr(self, name) == "":
                raise InvalidConfig(f"{name} is empty: give one, or leave the option out")
            if name in TLS and getattr(self, name) and self.ssl_certfile is None:
                raise InvalidConfig(f"{name} is given without ssl_certfile")
        for name in ("served_model_name", "api_key", "admin_key", "cors_origin", "allowed_host", "forwarded_allow_ips"):
            value = getattr(self, name)
            texts = (value,) if name == "admin_key" and value is not None else value
            if texts is not None and not (isinstance(texts, tuple) and texts and all(map(_is_word, texts))):
                quoted = "" if name.endswith("_key") else f" {shown(value)}"  # keys are secrets
                raise InvalidConfig(
                    f"{name} cannot be{quoted}: it must be printable text, not empty, without blanks around it"
                )
        if self.admin_key in (self.api_key or ()):
            raise InvalidConfig("admin_key is one of api_key, whose client would be the admin: give it another value")
        for text in self.forwarded_allow_ips or ():
            if text != "*" and not _is_network(text):
                raise InvalidConfig(
                    f"forwarded_allow_ips holds {shown(text)}: give addresses, networks such as 10.0.0.0/8, or *"
                )


def _is_word(text: object) -> bool:
    """Whether a header of HTTP can hold it as it is."""
    return isinstance(text, str) and text.isprintable() and bool(text) and text == text.strip()


def _is_network(text: str) -> bool:
    try:
        return bool(ipaddress.ip_network(text))
    except ValueError:
        return False
