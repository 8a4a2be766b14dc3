"""The process of a rank: it builds an engine, and its executor carries out the plans that arrive.

`python -m nanoengine.scale.worker.process FD`: pickled messages on the socket FD. The first message has the config and the
member of the group. `ALIVE` goes back once a second while the engine is built, then (0, success, None or error). Plans follow,
numbered without gaps; for each of them (number, success, result or error) goes back. Only rank 0 sends results. The process ends
when None arrives, or when the socket is closed.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from nanoengine.builder import build_engine
from nanoengine.core.config import EngineConfig
from nanoengine.scale.worker.child import connect_to_parent, portable, receive, signs_of_life
from nanoengine.scale.worker.member import ALIVE, Member


def main() -> None:
    connection = connect_to_parent()
    messages: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, messages), daemon=True).start()
    config, member, use_tqdm = messages.get()
    try:
        with signs_of_life(partial(connection.send, ALIVE)):
            executor = build_engine(config_of(config, member), use_tqdm).engine.executor
    except Exception as error:
        connection.send((0, False, portable(error)))
        return
    connection.send((0, True, None))
    while (message := messages.get()) is not None:
        number, plan = message
        answer: tuple[int, bool, object]
        try:
            result = executor.launch(plan)()
            answer = number, True, result if member.rank == 0 else None
        except Exception as error:
            answer = number, False, portable(error)
        connection.send(answer)


def config_of(config: EngineConfig, member: Member) -> EngineConfig:
    """The config of one process of the group: each rank has a GPU for itself, on machines with GPUs."""
    is_one_of_many = member.size > 1 and config.device.startswith("cuda")
    device = f"cuda:{member.rank}" if is_one_of_many else config.device
    return replace(config, device=device, options={**config.options, Member: member})


def _receive(connection: Connection, messages: SimpleQueue[Any]) -> None:
    while True:
        messages.put(receive(connection))


if __name__ == "__main__":
    main()
