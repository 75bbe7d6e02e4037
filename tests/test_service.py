"""The service as its clients see it."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import requests
import soundfile

from asr.audio.reading import SAMPLE_RATE
from asr.decode.recognizer import Recognizer
from asr.formats import FORMATS
from asr.service import MOST_LETTERS, MOST_PHRASES, OF_WHISPER


def ask(server: str, path=None, **fields) -> requests.Response:
    files = {"file": path.open("rb")} if path else None
    return requests.post(f"{server}/v1/audio/transcriptions", files=files, data=fields, timeout=60)


def test_json_is_the_text_and_nothing_else(server, files, served):
    ignored = {"model": "whisper-1", "languages[]": "en", "temperature": "0", "prompt": "Ghibli", "stream": "False"}
    ignored |= {"chunking_strategy[type]": "server_vad", "include[]": "logprobs"}  # as OpenAI's client sends objects
    answer = ask(server, files / "a.wav", **ignored)
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"text": served.transcribe(files / "a.wav").text} != {"text": ""}


@pytest.mark.parametrize("response_format", ["text", "srt", "vtt"])
def test_other_formats_are_those_of_the_command(server, files, served, response_format):
    answer = ask(server, files / "a.wav", response_format=response_format)
    assert answer.text == FORMATS[response_format](served.transcribe(files / "a.wav"))


def test_verbose_json_has_segments_and_if_asked_for_all_words_in_one_list(server, files, served):
    known = json.loads(FORMATS["json"](served.transcribe(files / "a.wav")))
    del known["file"]
    found = ask(server, files / "a.wav", response_format="verbose_json", language="en").json()
    [segment] = known["segments"]
    assert segment["words"] and segment["words"][0]["start"] >= 0
    more = {"id": 0, "avg_logprob": found["segments"][0]["avg_logprob"], **OF_WHISPER}  # strict clients require it
    scores = [score for word in served.transcribe(files / "a.wav").segments[0].words for score in word.token_scores]
    assert more["avg_logprob"] == pytest.approx(sum(scores) / len(scores)) and len(scores) > 1
    assert found == known | {"task": "transcribe", "language": "en", "segments": [segment | more]}
    asked = {"response_format": "verbose_json", "language": "en", "timestamp_granularities[]": ["word", "segment"]}
    assert ask(server, files / "a.wav", **asked).json() == found | {"words": segment["words"]}


def test_phrases_are_of_one_request(server, files):
    before = ask(server, files / "a.wav").json()
    asked = ask(server, files / "a.wav", phrases="abab\ncdcd", phrase_weight="50").json()
    assert "abab" in asked["text"].replace(" ", "") or "cdcd" in asked["text"].replace(" ", "")
    for name in ("phrases[]", "keywords[]"):
        assert ask(server, files / "a.wav", **{name: ["abab", "cdcd"], "phrase_weight": "50"}).json() == asked
    assert ask(server, files / "a.wav").json() == before != asked


def test_as_many_phrases_as_there_may_be_can_be_a_field_each(server, files):
    answer = ask(server, files / "a.wav", **{"phrases[]": ["ab"] * MOST_PHRASES})
    assert answer.status_code == 200, answer.text
    assert "phrases: more than 1000" in ask(server, files / "a.wav", **{"phrases[]": ["ab"] * (MOST_PHRASES + 1)}).text


def test_many_at_once_are_answered_as_one_is(server, files):
    alone = {name: ask(server, files / f"{name}.wav").json() for name in "ab"}
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda name: ask(server, files / f"{name}.wav").json(), "ab" * 12))
    assert answers == [alone[name] for name in "ab" * 12]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"phrase": "Ghibli"}, "phrase is not known here; fields are file, response_format"),
        ({"stream": "true"}, "stream: transcripts are only sent whole"),
        ({"phrases": "a\n" * (MOST_PHRASES + 1)}, "phrases: more than 1000"),
        ({"phrases": "a " * MOST_LETTERS}, "20000 letters in all"),
        ({"phrase_weight": "2"}, "phrase_weight 2: there are no phrases"),
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
    for fields in ({"model": "exp/tiny"}, {"\0ID3": ""}):  # the second is a file without a form (curl --data-binary)
        assert ask(server, **fields).json()["error"]["message"] == "file must be an audio file, in a multipart form"
    answer = ask(server, files / "a.txt")
    assert answer.status_code == 400
    assert answer.json() == {
        "error": {"message": "a.txt: this is text, not audio", "type": "invalid_request_error"},
        "text": "",
    }
    nothing = {"file": ("", b"")}  # what a browser sends for a form in which no file was chosen
    answer = requests.post(f"{server}/v1/audio/transcriptions", files=nothing, timeout=60)
    assert answer.json()["error"]["message"] == "<file>: the file is empty"


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
    for headers in ({}, {"Content-Length": "10"}):
        unsized = requests.post(f"{server}/v1/audio/transcriptions", data=iter([b"sound"]), headers=headers, timeout=60)
        assert unsized.status_code == 411


def test_of_a_recording_that_is_too_long_the_beginning_is_transcribed(server, files):
    soundfile.write(files / "long.flac", np.zeros(100 * SAMPLE_RATE), SAMPLE_RATE)
    answer = ask(server, files / "long.flac")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "long.flac: longer than 30 s"


def test_without_ctc_words_have_no_times(server, files, served):
    served.word_times = False
    assert ask(server, files / "a.wav", response_format="verbose_json").status_code == 200
    asked = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
    assert "the model has no CTC" in ask(server, files / "a.wav", **asked).json()["error"]["message"]


def test_a_fault_of_the_server_is_no_fault_of_the_request(server, files, monkeypatch):
    def failing(self, inputs):
        raise RuntimeError("shape '[2, 3]' is invalid")

    with monkeypatch.context() as patch:
        patch.setattr(Recognizer, "recognize", failing)
        answer = ask(server, files / "a.wav")
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert requests.get(f"{server}/health", timeout=60).status_code == 503
    assert requests.get(f"{server}/health", timeout=60).status_code == 200
    assert ask(server, files / "a.wav").status_code == 200


@pytest.fixture
def slow(served, monkeypatch):
    """An event that is set when a batch has started, an event that lets it continue, and the sizes of the batches."""
    began, go_on, batches, recognize = threading.Event(), threading.Event(), [], served.recognize

    def wait(inputs):
        batches.append(len(inputs))
        began.set()
        assert go_on.wait(60)
        return recognize(inputs)

    monkeypatch.setattr(served, "recognize", wait)
    yield began, go_on, batches
    go_on.set()


def test_who_goes_is_not_transcribed_on(slow, server, files):
    began, go_on, batches = slow
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, server, files / "a.wav")
        assert began.wait(60)
        with pytest.raises(requests.Timeout), (files / "b.wav").open("rb") as sound:  # it waits behind the first
            requests.post(f"{server}/v1/audio/transcriptions", files={"file": sound}, timeout=0.3)
        time.sleep(1.5)
        go_on.set()
        assert first.result().status_code == 200
    assert ask(server, files / "a.wav").status_code == 200
    assert batches == [1, 1]


def test_more_than_may_wait_are_refused(slow, server, files):
    began, go_on, _ = slow
    with ThreadPoolExecutor(40) as pool:
        first = pool.submit(ask, server, files / "a.wav")
        assert began.wait(60)
        answers = [pool.submit(ask, server, files / "b.wav") for _ in range(39)]
        while sum(answer.done() for answer in answers) < 8:  # 2 are read, and 30 wait
            time.sleep(0.01)
        go_on.set()
        refused = [answer.result() for answer in answers if answer.result().status_code != 200]
    assert first.result().status_code == 200 and len(refused) == 8
    assert all(answer.status_code == 503 and answer.headers["Retry-After"] == "10" for answer in refused)
    assert ask(server, files / "a.wav").status_code == 200  # who has been answered waits no longer


def test_it_says_which_model_it_has_and_that_it_lives(server):
    assert requests.get(f"{server}/health", timeout=60).json() == {"status": "ok"}
    [model] = requests.get(f"{server}/v1/models", timeout=60).json()["data"]
    assert model["id"] == "exp/tiny" and model["object"] == "model"
    assert requests.get(f"{server}/v1/models/exp/tiny", timeout=60).json() == model
    assert requests.get(f"{server}/v1/models/whisper-1", timeout=60).status_code == 404
    assert requests.get(f"{server}/v1/audio/translations", timeout=60).json()["error"]["message"] == "Not Found"
