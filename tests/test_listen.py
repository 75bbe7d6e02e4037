"""The listening command: what it prints, and how it ends."""

import contextlib
import json
import os
import pty
import queue
import re
import signal
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest

from asr.audio.reading import SAMPLE_RATE, read_audio
from asr.decode.listening import Heard
from asr.decode.transcript import Segment
from asr.listen import _as_json, _on_terminal, _read
from asr.resources import resource
from tests.test_commands import call

CORNER = "a man with a black dog was standing at the corner"
GLASS = "there was nothing on the table but a book and a glass of water"
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def raw(*names: str, pause: float = 0.8) -> bytes:
    """Shipped samples, followed by a pause, as bytes."""
    sounds = [read_audio(resource("data", "samples", f"{name}.flac")) for name in names]
    whole = np.concatenate([*sounds, np.zeros(round(pause * SAMPLE_RATE), np.float32)])
    return (whole * 32767).astype("<i2").tobytes()


@pytest.fixture
def listening(programs):
    """Starts the command."""
    running = []

    def start(*arguments: str, python=programs / "python", **pipes) -> subprocess.Popen:
        command = [python, "-m", "asr.listen", "--precision", "float32", *arguments]
        running.append(subprocess.Popen(command, **(PIPES | pipes)))
        return running[-1]

    yield start
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()


def test_a_pause_ends_a_line_while_more_is_to_come(listening):
    process = listening()
    process.stdin.write(raw("corner"))
    process.stdin.flush()
    assert process.stdout.readline().decode() == f"{CORNER}\n"
    out, err = process.communicate(raw("glass", pause=0.0))  # the segment ends where the audio ends
    assert (out.decode(), err, process.returncode) == (f"{GLASS}\n", b"", 0)


def test_json_has_drafts_and_segments_with_times(listening):
    process = listening("--format", "json")
    process.stdin.write(raw("corner", pause=0.0))
    process.stdin.flush()
    draft = json.loads(process.stdout.readline())
    assert draft == {"type": "draft", "start": 0.0, "settled": "", "tentative": draft["tentative"]}
    assert draft["tentative"].startswith("a man with")
    out, _ = process.communicate(raw(pause=1.0) + raw("glass"))
    segments = [each for each in map(json.loads, out.splitlines()) if each["type"] == "segment"]
    assert [segment["text"] for segment in segments] == [CORNER, GLASS]
    assert segments[1]["words"][0]["start"] == pytest.approx(segments[1]["start"], abs=0.4)


def test_a_draft_is_taken_back_if_it_was_no_word_and_replaced_by_the_segment_if_it_was(capsys):
    for heard in (Heard(start=0.5, tentative="cough"), Heard(), Heard([Segment(2.0, 3.0, "a man", 0.0)])):
        _as_json(heard)
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["type"], each["start"]) for each in told] == [("draft", 0.5), ("draft", None), ("segment", 2.0)]


def test_other_rates_are_heard_as_well(listening):
    samples = np.frombuffer(raw("corner"), "<i2")
    twice = np.repeat(samples, 2).tobytes()  # 32 kHz, as a cheap device would make it
    out, _ = listening("--rate", "32000").communicate(twice)
    assert out.decode() == f"{CORNER}\n"


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals there")
def test_on_a_terminal_the_last_line_is_what_is_being_said(listening):
    own, its = pty.openpty()
    process = listening("--every", "0.3", stdout=its)
    os.close(its)
    process.stdin.write(raw("corner", pause=0.0))
    process.stdin.flush()
    shown = os.read(own, 1000)
    process.communicate(raw(pause=1.0))
    with contextlib.suppress(OSError):  # how Linux signals the end of a terminal
        while block := os.read(own, 1000):
            shown += block
    os.close(own)
    drafts = [re.sub(r"\033\[\d?m", "", line).strip() for line in shown.decode().split("\r\033[K")]
    assert drafts[1].startswith("a man with") and drafts[-1] == CORNER


def test_ctrl_c_ends_it_after_what_was_said(listening, ctrl_c):
    process = listening(python=sys.executable)
    process.stdin.write(raw("corner") + raw("glass", pause=0.1))
    process.stdin.flush()
    assert process.stdout.readline().decode() == f"{CORNER}\n"  # it is listening
    process.send_signal(signal.SIGINT)
    assert process.stdout.read().decode() == f"{GLASS}\n"
    assert process.wait() == 0 and process.stderr.read() == b""


@pytest.mark.parametrize(
    ("arguments", "sound", "said"),
    [
        ([], b"RIFF1234WAVE", "standard input is WAV, not raw samples"),
        (["--rate", "800"], b"", "--rate lies between 4000 and 768000, and is 800"),
        (["--drafts", "ctc"], b"", "--drafts and --every are for a terminal, or for --format json"),
        (["--drafts", "beam", "--format", "json"], b"\0\0", "--drafts must be one of rescore, greedy, ctc, not beam"),
        (["--every", "nan"], b"", "--every lies between 0.1 and 60.0, and is nan"),
        (["--pause", "0.1"], b"", "--pause lies between 0.2 and 60.0, and is 0.1"),
        (["--model", "nowhere"], b"\0\0", "nowhere: not a model folder"),
    ],
)
def test_what_it_cannot_do_is_one_line(listening, arguments, sound, said):
    process = listening(*arguments)
    _, err = process.communicate(sound)
    assert process.returncode == 2 and said in err.decode() and err.count(b"\n") == 1


def test_without_standard_input_it_says_what_to_pipe(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    done = call("asr.listen")
    assert done.returncode == 2 and b"arecord" in done.stderr


@pytest.mark.usefixtures("ctrl_c")  # which the command takes
@pytest.mark.parametrize(("options", "times"), [([], (0.5, 0.5)), (["--every", 2, "--pause", 3], (2, 3))])
def test_drafts_and_pauses_are_as_the_options_say(files, monkeypatch, options, times):
    read, write = os.pipe()
    os.close(write)
    given = []
    monkeypatch.setattr("asr.decode.listening.listen", lambda *settings: given.append(settings[3:]) or [])
    with open(read) as pipe:
        monkeypatch.setattr("sys.stdin", pipe)
        assert call("asr.listen", "--model", files / "model", "--format", "json", *options).returncode == 0
    assert given == [times]


def test_sound_that_cannot_be_read_to_its_end_ends_all_the_same():
    own, other = socket.socketpair()
    with own:
        own.send(b"what nobody reads")
        other.close()
        inbox: queue.Queue[bytes | None] = queue.Queue()
        failed: list[Exception] = []
        _read(own.fileno(), inbox, threading.Event(), failed)
    assert inbox.get_nowait() is None and isinstance(failed[0], ConnectionResetError)


def test_what_does_not_fit_the_line_is_left_out_at_its_beginning(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "42")
    cases = (("s" * 100, "t" * 60, 40), ("s" * 100, "t" * 10, 40), ("s" * 5, "t", 6), ("字" * 100, "字" * 5, 40))
    for settled, tentative, shown in cases:
        _on_terminal(Heard(start=0.0, settled=settled, tentative=tentative))
        written = capsys.readouterr().out
        assert written.count("s") + written.count("t") + 2 * written.count("字") == shown  # which is two columns wide
