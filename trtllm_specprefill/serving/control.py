"""Short messages between the models of one server, past Triton.

A model that is working cannot be asked anything through Triton, unless it is decoupled; and
calls of decoupled models from several threads at once bring Triton's Python backend down
(2.51). So each model listens on a socket in a folder of the server's own: JSON in, JSON out. A
model of several processes has one for each, `model.0` and so on.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from trtllm_specprefill.errors import InputError, TargetFailed

_LONGEST = 107 - len("/specprefill_infer.999")  # characters of a folder; Linux bounds the whole


def check_folder(folder: Path) -> None:
    """Raise `InputError` unless sockets can be made in `folder`."""
    if len(str(folder)) > _LONGEST:
        raise InputError("repository", str(folder), f"a path of at most {_LONGEST} characters")


def listen(folder: Path, model: str, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer messages to `model` from threads of their own, as long as the process lives."""
    path = folder / model
    path.unlink(missing_ok=True)  # left by a process that was killed
    listener = Listener(str(path), "AF_UNIX", backlog=64)

    def serve(connection: Connection) -> None:
        with connection, suppress(EOFError, OSError):
            message = json.loads(connection.recv_bytes())
            connection.send_bytes(json.dumps(answer(message)).encode())

    def accept() -> None:
        while True:
            with suppress(OSError):
                threading.Thread(target=serve, args=(listener.accept(),), daemon=True).start()

    threading.Thread(target=accept, name="control", daemon=True).start()


def listeners(folder: Path, model: str) -> list[str]:
    """The names under which the processes of `model` listen, or did until they died."""
    return [path.name for path in folder.iterdir() if path.name.partition(".")[0] == model]


def tell(folder: Path, model: str, message: dict[str, Any]) -> dict[str, Any]:
    """The answer of `model` to a message; `TargetFailed` when nothing answers there."""
    try:
        with Client(str(folder / model), "AF_UNIX") as connection:
            connection.send_bytes(json.dumps(message).encode())
            answer: dict[str, Any] = json.loads(connection.recv_bytes())
            return answer
    except (OSError, EOFError) as error:
        raise TargetFailed(f"{model} does not answer ({error})") from None
