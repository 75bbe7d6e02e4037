"""The serving command: what it says, and how it ends."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_commands import call
from tests.test_service import ask


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the process in /proc")
def test_it_answers_until_it_is_told_to_end_and_waits_for_no_upload_for_ever(files, programs):
    words = [programs / "python", "-m", "asr.serve", "--model", files / "model", "--port", "0", "--device", "cpu"]
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    with subprocess.Popen([*words, "--grace-seconds", "1"], text=True, **pipes) as caller:
        port = re.match(r"asr.serve: http://127.0.0.1:(\d+)/v1/audio/transcriptions\n", caller.stderr.readline())[1]
        assert ask(f"http://127.0.0.1:{port}", files / "a.wav").status_code == 200
        taken = call("asr.serve", "--model", files / "model", "--port", port)
        assert taken.returncode == 2 and b"Address already in use" in taken.stderr
        upload = b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: a\r\nContent-Length: 900\r\n"
        upload += b"Content-Type: multipart/form-data; boundary=b\r\n\r\n--b"
        with socket.create_connection(("127.0.0.1", int(port))) as aborted:
            aborted.sendall(upload)
        with socket.create_connection(("127.0.0.1", int(port))) as stuck:
            stuck.sendall(upload)
            assert ask(f"http://127.0.0.1:{port}", files / "a.wav").status_code == 200
            server = (programs / "pid").read_text()
            [process] = Path(f"/proc/{server}/task/{server}/children").read_text().split()
            os.kill(int(process), signal.SIGTERM)
            said = caller.stderr.read()  # returns when the server has ended
    assert "Finished server process" in said and "499" not in said and "ClientDisconnect" not in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--at-once", "0"], b"--at-once must be positive, not 0"),
        (["--streams", "-1"], b"--streams must be positive, not -1"),
        (["--max-seconds", "nan"], b"--max-seconds must be positive, not nan"),
        (["--max-waiting", "-1"], b"--max-waiting and --grace-seconds must not be negative"),
        (["--port", "99999"], b"--port lies between 0 and 65535, and is 99999"),
        (["--model", "nowhere"], b"nowhere: not a model folder"),
        (["--host", "256.0.0.1"], b"asr.serve: --host 256.0.0.1: "),
    ],
)
def test_what_it_cannot_do_is_one_line(arguments, said):
    done = call("asr.serve", "--port", "0", *arguments)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count(b"\n") == 1


def test_every_limit_has_its_option(files, monkeypatch):
    given = []

    def application(recognizer, name, limits):
        given.append((name, limits._asdict()))
        raise ValueError("enough")

    monkeypatch.setattr("asr.service.application", application)
    limits = ["--at-once", 2, "--max-waiting", 3, "--max-mib", 4, "--max-seconds", 5, "--streams", 6]
    done = call("asr.serve", "--model", files / "model", "--port", "0", *limits)
    assert done.stderr == b"asr.serve: enough\n"
    assert given == [(str(files / "model"), {"at_once": 2, "waiting": 3, "mib": 4, "seconds": 5, "streams": 6})]


@pytest.mark.parametrize("library", ["uvicorn", "websockets", "starlette.applications", "python_multipart"])
def test_a_library_that_is_missing_is_named(files, monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, "asr.service", raising=False)
    done = call("asr.serve", "--model", files / "model")
    assert done.returncode == 2 and f"{library} is missing: pip install '.[serve]'".encode() in done.stderr
