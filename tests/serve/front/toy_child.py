"""A process as the front starts it, without a model: `model` says how it behaves. It begins in milliseconds.

"fails": it ends with an error; "hangs": it never answers; "odd": it lists no models; any other: it serves. A prompt "wait" is
never answered, "bad" is refused, and "odd" too, by what is no error's JSON; "cut" in the middle of the answer the process dies,
any other comes back, word by word if it is to be streamed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from threading import Thread
from typing import Any

ORDER = json.loads(sys.stdin.readline())
NAME = ORDER["config"]["served_model_name"][0]
NAMES = [NAME]  # and those of adapters


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def address_string(self) -> str:
        return "front"

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if body:
            self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            field = "nothing" if ORDER["model"] == "odd" else "data"
            self.answer(200, json.dumps({field: [{"id": name, "max_model_len": 64} for name in NAMES]}).encode())
        elif self.path == "/metrics":
            text = f'# HELP tokens Tokens.\n# TYPE tokens counter\ntokens{{engine="0"}} {len(NAME)}\nup 1\n'
            self.answer(200, text.encode(), "text/plain")
        else:
            self.answer(200, b"")

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        prompt = request.get("prompt", "")
        if "lora_name" in request:
            NAMES.append(request["lora_name"])
            self.answer(200, b"{}")
        elif prompt == "wait":
            print('{"level": 30, "message": "of another library"}', file=sys.stderr)
            print("waits", file=sys.stderr, flush=True)
            while self.connection.recv(1):
                pass
            print("hung up", file=sys.stderr, flush=True)
        elif prompt == "odd":
            self.answer(500, b"[]")
        elif prompt == "bad":
            self.answer(400, json.dumps({"error": {"message": "prompt is bad", "param": "prompt"}}).encode())
        elif request.get("stream"):
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for word in prompt.split():
                if word == "cut":
                    os.kill(os.getpid(), signal.SIGKILL)
                    time.sleep(10)
                data = f"data: {word}\n\n".encode()
                self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
            self.wfile.write(b"0\r\n\r\n")
        else:
            told = {"model": NAME, "prompt": prompt, "client": self.headers["x-nanoengine-client"]}
            told |= {"secret": self.headers["authorization"], "options": ORDER["options"], "config": ORDER["config"]}
            self.answer(200, json.dumps(told).encode())


def main() -> None:
    if ORDER["model"] == "fails":
        sys.exit("its weights are broken")
    Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    if ORDER["model"] == "hangs":
        time.sleep(100)
    path = ORDER["config"]["front_socket"]
    with ThreadingUnixStreamServer(path + ".new", Handler) as server:
        server.daemon_threads = True
        os.chmod(path + ".new", 0o600)
        Path(path + ".new").rename(path)
        server.serve_forever()


main()
