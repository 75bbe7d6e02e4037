"""Runs commands without the seconds of their imports: a process that has imported everything forks for each command.

`programs()` starts it and yields a folder whose `python` passes commands (`python -m asr...`) and code (`python -c`) on
to it, with the arguments, environment, working directory and standard streams of the caller; anything else goes to the
interpreter. A command that starts others, such as a training with two processes, starts them with that `python`, too.
Trainings draw nothing, unless DRAW is in the environment.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from asr.heap import importing

ROOT = Path(__file__).parent.parent
PICTURES = {  # of a training, which would take half of a tiny one; and what draws nothing instead
    "asr.training.report._plots": lambda panels: "",
    "asr.training.callbacks.drawn": lambda weights: None,
    "torch.utils.tensorboard.SummaryWriter.add_figure": lambda *figure: None,
}
PYTHON = """#!{python} -SE
import json, os, socket, sys
if sys.argv[1:2] != ["-c"] and not (sys.argv[1:2] == ["-m"] and sys.argv[2].startswith("asr.")):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [b"!"], [0, 1, 2])
    server.sendall(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode())
    server.shutdown(socket.SHUT_WR)
    sys.exit((server.recv(1) or b"\\1")[0])
"""


@contextmanager
def programs() -> Iterator[Path]:
    """A temporary folder with a fast `python`, and with the `pid` of the process whose children run the commands."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:  # the path of a socket must be short
        address, python = f"{folder}/socket", Path(folder, "python")
        command = [sys.executable, "-m", "tests.forks", address]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, start_new_session=True) as server:
            try:
                assert server.stdout.readline() == b"ready\n"
                python.write_text(PYTHON.format(python=sys.executable, address=address))
                python.chmod(0o755)
                python.with_name("pid").write_text(str(server.pid))
                yield python.parent
            finally:
                os.killpg(server.pid, signal.SIGKILL)


def serve(address: str) -> None:
    """Forks for each connection, until it is killed."""
    with importing():
        import jiwer  # noqa: F401
        import matplotlib.backends.backend_svg
        import matplotlib.figure  # noqa: F401
        import torch.utils.tensorboard  # noqa: F401

        import asr.composition
        import asr.corpus.__main__
        import asr.training.language_model
        import asr.training.run  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children that have ended leave no zombies
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        print("ready", flush=True)
        while True:
            connection, _ = server.accept()
            if not os.fork():
                server.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                sys.executable = str(Path(address).with_name("python"))
                _answer(connection)
            connection.close()


def _answer(connection: socket.socket) -> None:
    """Runs the requested module or code, reports its exit code, and ends this process."""
    streams = socket.recv_fds(connection, 1, 3)[1]
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    from lightning.pytorch.utilities import rank_zero_only

    (how, what, *arguments), folder, environment = json.loads(connection.makefile("rb").read())
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    rank_zero_only.rank = int(environment.get("LOCAL_RANK", 0))  # Lightning reads it only on import
    sys.argv = [what if how == "-m" else how, *arguments]
    if "DRAW" not in environment:
        for name, nothing in PICTURES.items():
            mock.patch(name, nothing).start()
    code: object = 1
    try:
        if how == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    connection.sendall(bytes([code]))
    os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])
