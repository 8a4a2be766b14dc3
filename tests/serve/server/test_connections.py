"""Connections count from the moment at which they are accepted, and a TLS handshake has a limit."""

from __future__ import annotations

import random
import socket
import ssl
from pathlib import Path

import pytest

from tests.serve.server.conftest import MakeServer
from tests.serve.server.running import read_all, until

ASK = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
SENT = (b"", b"\x16", b"\x16\x03\x01\x02\x00\x01\x00", ASK)
"""What is never a whole handshake: nothing, the begin of one, and plain HTTP."""


def test_handshakes_that_never_end_take_nobody_elses_connections(
    make_server: MakeServer, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanoengine.serve.server.http.connections.HANDSHAKE_SECONDS", 2.0)
    rng, context = random.Random(1), ssl.create_default_context(cafile=f"{certificates}/certificate.pem")
    files = {
        f"ssl_{name}file": f"{certificates}/{file}.pem" for name, file in (("cert", "certificate"), ("key", "key"))
    }
    server = make_server(max_connections=8, **files)

    def ask(address: str) -> bytes:
        own = socket.create_connection(server.address, 20, (address, 0))
        with context.wrap_socket(own, server_hostname="127.0.0.1") as connection:
            connection.sendall(ASK)
            return read_all(connection)[:12]

    held = [server.connect(SENT[0]) for _ in range(8)]
    until(lambda: server.connections.total == 8)
    with pytest.raises(OSError):
        ask("127.0.0.1")
    assert ask("127.0.0.2") == b"HTTP/1.1 200", "another address"
    held += [server.connect(rng.choice(SENT)) for _ in range(40)]
    until(lambda: not server.connections.total)
    assert not server.connections.of_clients
    assert ask("127.0.0.1") == b"HTTP/1.1 200"
    for connection in held:
        connection.close()
