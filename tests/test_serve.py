"""The server as its clients see it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import requests
import soundfile
import uvicorn

from asr import serve
from asr.audio.reading import SAMPLE_RATE
from asr.decode import Recognizer
from asr.decode.sharing import SharedRecognizer
from asr.formats import FORMATS
from tests.conftest import sure_of_what_it_hears
from tests.test_commands import call


@pytest.fixture
def recognizer(files) -> Recognizer:
    sure_of_what_it_hears(files / "model")
    return Recognizer.load(files / "model", "cpu", precision="float32", word_times=True)


@pytest.fixture
def server(recognizer):
    """The address of one whose requests have at most 1 MiB."""
    app = serve.application(SharedRecognizer(recognizer), "tiny", at_once=4, max_mib=1.0)
    listening = socket.create_server(("127.0.0.1", 0))
    running = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    running.should_exit = True
    thread.join()


def ask(server: str, path=None, **fields) -> requests.Response:
    files = {"file": path.open("rb")} if path else None
    return requests.post(f"{server}/v1/audio/transcriptions", files=files, data=fields, timeout=60)


def test_json_is_the_text_and_nothing_else(server, files, recognizer):
    answer = ask(server, files / "a.wav", model="whisper-1", language="en", temperature="0", prompt="")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"text": recognizer.transcribe(files / "a.wav").text} != {"text": ""}


@pytest.mark.parametrize("response_format", ["text", "srt", "vtt"])
def test_other_formats_are_those_of_the_command(server, files, recognizer, response_format):
    answer = ask(server, files / "a.wav", response_format=response_format)
    assert answer.text == FORMATS[response_format](recognizer.transcribe(files / "a.wav"))


def test_verbose_json_has_segments_and_if_asked_for_all_words_in_one_list(server, files, recognizer):
    known = json.loads(FORMATS["json"](recognizer.transcribe(files / "a.wav")))
    del known["file"]
    found = ask(server, files / "a.wav", response_format="verbose_json").json()
    [segment] = known["segments"]
    assert segment["words"] and segment["words"][0]["start"] >= 0
    assert found == known | {"task": "transcribe", "segments": [{"id": 0, **segment}]}
    asked = {"response_format": "verbose_json", "timestamp_granularities[]": ["word", "segment"]}
    assert ask(server, files / "a.wav", **asked).json() == found | {"words": segment["words"]}


def test_phrases_are_of_one_request(server, files):
    before = ask(server, files / "a.wav").json()
    asked = ask(server, files / "a.wav", phrases="abab\ncdcd", phrase_weight="50").json()
    assert "abab" in asked["text"].replace(" ", "") or "cdcd" in asked["text"].replace(" ", "")
    assert ask(server, files / "a.wav").json() == before != asked


def test_many_at_once_are_answered_as_one_is(server, files):
    alone = {name: ask(server, files / f"{name}.wav").json() for name in "ab"}
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda name: ask(server, files / f"{name}.wav").json(), "ab" * 12))
    assert answers == [alone[name] for name in "ab" * 12]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt": "Ghibli"}, "prompt is not known here; fields are file, response_format"),
        ({"response_format": "xml"}, "response_format is one of json, verbose_json, text, srt, vtt, not xml"),
        ({"timestamp_granularities[]": "letter"}, "are word and segment, not letter"),
        ({"phrases": "abab", "phrase_weight": "heavy"}, "phrase_weight must be a number, not heavy"),
        ({"phrases": "abab", "phrase_weight": "-1"}, "phrase_weight must be finite and not negative"),
    ],
)
def test_what_cannot_be_is_said(server, files, fields, said):
    answer = ask(server, files / "a.wav", **fields)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_what_is_no_sound_is_said(server, files):
    assert "file must be a sound file" in ask(server, model="tiny").json()["error"]["message"]
    answer = ask(server, files / "a.txt")
    assert answer.status_code == 400
    assert answer.json() == {
        "error": {"message": "a.txt: this is text, not sound", "type": "invalid_request_error"},
        "text": "",
    }


def test_of_a_damaged_file_what_comes_before_is_not_lost(server, files):
    (files / "cut.wav").write_bytes((files / "a.wav").read_bytes()[:-8_000])
    answer = ask(server, files / "cut.wav")
    assert answer.status_code == 400
    assert "cut.wav: " in answer.json()["error"]["message"] and answer.json()["text"]


def test_a_request_that_is_too_large_is_refused_before_it_is_read(server, files):
    soundfile.write(files / "long.wav", np.zeros(40 * SAMPLE_RATE), SAMPLE_RATE)
    answer = ask(server, files / "long.wav")
    assert answer.status_code == 413
    assert answer.json()["error"]["message"] == "the request has 1.2 MiB, at most 1 are taken"
    unsized = requests.post(f"{server}/v1/audio/transcriptions", data=iter([b"sound"]), timeout=60)
    assert unsized.status_code == 411


def test_a_fault_of_the_server_is_no_fault_of_the_request(server, files, recognizer, monkeypatch):
    def failing(inputs):
        raise RuntimeError("shape '[2, 3]' is invalid")

    with monkeypatch.context() as patch:
        patch.setattr(recognizer, "recognize", failing)
        answer = ask(server, files / "a.wav")
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert ask(server, files / "a.wav").status_code == 200


def test_who_goes_is_not_transcribed_on(server, files, recognizer, monkeypatch):
    began, go_on, batches, recognize = threading.Event(), threading.Event(), [], recognizer.recognize

    def slow(inputs):
        batches.append(len(inputs))
        began.set()
        assert go_on.wait(60)
        return recognize(inputs)

    monkeypatch.setattr(recognizer, "recognize", slow)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, server, files / "a.wav")
        assert began.wait(60)
        with pytest.raises(requests.Timeout):  # while it waits behind the first
            files_ = {"file": (files / "b.wav").open("rb")}
            requests.post(f"{server}/v1/audio/transcriptions", files=files_, timeout=0.3)
        time.sleep(1.5)
        go_on.set()
        assert first.result().status_code == 200
    assert ask(server, files / "a.wav").status_code == 200
    assert batches == [1, 1]


def test_it_says_which_model_it_has_and_that_it_lives(server):
    assert requests.get(f"{server}/health", timeout=60).json() == {"status": "ok"}
    assert [model["id"] for model in requests.get(f"{server}/v1/models", timeout=60).json()["data"]] == ["tiny"]
    assert requests.get(f"{server}/v1/audio/translations", timeout=60).json()["error"]["message"] == "Not Found"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the process in /proc")
def test_the_command_answers_until_it_is_told_to_end(files, programs):
    words = [programs / "python", "-m", "asr.serve", "--model", files / "model", "--port", "0", "--device", "cpu"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as caller:
        port = re.match(r"asr.serve: http://127.0.0.1:(\d+)/v1/audio/transcriptions\n", caller.stderr.readline())[1]
        assert ask(f"http://127.0.0.1:{port}", files / "a.wav").status_code == 200
        taken = call("asr.serve", "--model", files / "model", "--port", port)
        assert taken.returncode == 2 and b"Address already in use" in taken.stderr
        server = (programs / "pid").read_text()
        [process] = Path(f"/proc/{server}/task/{server}/children").read_text().split()
        os.kill(int(process), signal.SIGTERM)
        assert "Application shutdown complete" in caller.stderr.read()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--at-once", "0"], b"--at-once and --max-mib must be positive"),
        (["--model", "nowhere"], b"nowhere: not a model folder"),
        (["--host", "256.0.0.1"], b"256.0.0.1"),
    ],
)
def test_what_it_cannot_do_is_one_line(arguments, said):
    done = call("asr.serve", "--port", "0", *arguments)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count(b"\n") == 1


def test_a_library_that_is_missing_is_named(files, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    done = call("asr.serve", "--model", files / "model")
    assert done.returncode == 2 and b"uvicorn is missing: pip install '.[serve]'" in done.stderr
