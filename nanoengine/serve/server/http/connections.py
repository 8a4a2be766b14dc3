"""Connections: how many are open, of each address and in total. One counts from the moment at which it is accepted, before its
TLS handshake, until its socket is closed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from asyncio.sslproto import SSLProtocol
from typing import Any, cast

from nanoengine.serve.server.admission.quota import Quota
from nanoengine.serve.server.http.bounded_http import BoundedHTTP

HANDSHAKE_SECONDS = 8.0
"""Seconds in which a TLS handshake must be over, and so must the end of a connection; then the socket is closed."""


def client_of(address: str) -> str:
    """The client of an address. IPv6: the network of its /64, since each customer has so many addresses. A value that is not an
    IP address (X-Forwarded-For may hold anything) is "unknown".
    """
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return "unknown"
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ip.ipv4_mapped or ipaddress.IPv6Network((ip, 64), strict=False))
    return address


class CountedConnection(asyncio.BaseProtocol):
    """The protocol next to the socket. `connections`: how many there are; the other arguments are those of the next class."""

    def __init__(self, connections: Quota, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._connections, self._address = connections, ""

    def connection_made(self, transport: Any) -> None:
        peer = transport.get_extra_info("peername")
        self._address = client_of(peer[0]) if peer else "local"
        has_room = self._connections.has_room(self._address)
        self._connections.take(self._address)  # also if it is refused, until it is closed
        super().connection_made(transport)
        if not has_room:
            cast(Any, self).refuse(b"503 Service Unavailable")

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.release(self._address)
        super().connection_lost(exc)


class CountedHTTP(CountedConnection, BoundedHTTP):
    """A connection in plain HTTP."""


class CountedTLS(CountedConnection, SSLProtocol):  # type: ignore[misc]
    """A connection in HTTPS."""

    @classmethod
    def of(cls, connections: Quota, context: ssl.SSLContext, **options: Any) -> CountedTLS:
        """`options`: of `BoundedHTTP`, which the connection carries."""
        limits = dict.fromkeys(("ssl_handshake_timeout", "ssl_shutdown_timeout"), HANDSHAKE_SECONDS)
        loop, http = asyncio.get_running_loop(), BoundedHTTP(**options)
        return cls(connections, loop, http, context, None, server_side=True, **limits)

    def refuse(self, _: bytes) -> None:
        """Close the connection without a word, which would take a handshake."""
        cast(Any, self._transport).abort()
