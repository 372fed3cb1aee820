"""A `specsot` that starts at once: one process imports everything, and forks for each command.

    python warm.py serve SOCKET          waits for commands
    python warm.py ask SOCKET WORD ...   has one done, as if it had been started here

The words of a command are those behind `python`: `-m specsot run` is run as a module."""

import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback

MODULES = (
    "specsot.engine.cli.main specsot.engine.cli.decoding specsot.engine.cli.live_run "
    "specsot.engine.run.api specsot.engine.run.writer specsot.engine.bench.command "
    "specsot.engine.certify.verify_run specsot.engine.cli.train specsot.engine.train.eagle"
)


def serve(place: str) -> None:
    import importlib

    import torch

    torch.set_num_threads(1)
    for module in MODULES.split():
        importlib.import_module(module)
    api = importlib.import_module("specsot.engine.run.api")  # what is imported on the way, too
    api.generate(api.open_session("bim_eagle", max_new_tokens=1, threads=1), "Hello")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    server = socket.socket(socket.AF_UNIX)
    server.bind(place)
    server.listen()
    print("ready", flush=True)
    while server in select.select([server, sys.stdin], [], [])[0]:
        connection, _ = server.accept()
        if os.fork() == 0:
            server.close()
            os._exit(_perform(connection))
        connection.close()


def _perform(connection: socket.socket) -> int:
    """In the child: become the process that asked, run, and tell the exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    data, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    asked = json.loads(data)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    code = _run(asked["words"])
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    connection.send(bytes([code]))
    return 0


def _run(words: list[str]) -> int:
    sys.argv = words[1:]
    try:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return int(end.code or 0) if isinstance(end.code, int | None) else 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def ask(place: str, words: list[str]) -> int:
    """Hand streams, folder, environment and words to the server; the exit code."""
    client = socket.socket(socket.AF_UNIX)
    client.connect(place)
    asked = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}
    socket.send_fds(client, [json.dumps(asked).encode()], [0, 1, 2])
    answer = client.recv(1)
    return answer[0] if answer else 1


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        sys.exit(ask(sys.argv[2], sys.argv[3:]))
