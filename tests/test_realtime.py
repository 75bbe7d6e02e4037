"""A realtime session as its client sees it."""

import asyncio
import base64
import json
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import requests
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from asr.audio.reading import SAMPLE_RATE
from asr.decode import listening
from asr.decode.listening import Heard
from asr.decode.recognizer import Recognizer
from asr.decode.transcript import Segment
from asr.realtime import TRANSCRIPTION, Connection, Settings
from asr.service import MOST_PHRASES
from tests.decode.test_recognizer import noise
from tests.decode.test_segments import loudness

SILENCE = np.zeros(SAMPLE_RATE, np.float32)


class Client:
    def __init__(self, connection: ClientConnection):
        self.connection = connection

    def say(self, kind: str, **fields) -> None:
        self.connection.send(json.dumps({"type": kind, **fields}))

    def speak(self, samples: np.ndarray) -> None:
        raw = (samples * 32768).astype("<i2").tobytes()
        for begin in range(0, len(raw), 10_001):  # not at the boundaries of samples
            audio = base64.b64encode(raw[begin : begin + 10_001]).decode()
            self.say("input_audio_buffer.append", audio=audio)

    def update(self, **audio) -> dict:
        self.say("session.update", session={"type": "transcription", "audio": {"input": audio}})
        return self.hear()[-1]

    def hear(self, last: str = "session.updated") -> list[dict]:
        """The events up to one of type `last`, or up to an error."""
        events = [{"type": ""}]
        while events[-1]["type"] not in (last, "error"):
            events.append(json.loads(self.connection.recv(timeout=30)))
        return events[1:]

    def completed(self) -> list[dict]:
        return self.hear(f"{TRANSCRIPTION}.completed")


@pytest.fixture
def address(server, monkeypatch) -> str:
    monkeypatch.setattr(listening, "SpeechDetector", lambda: loudness)
    return server.replace("http", "ws") + "/v1/realtime?intent=transcription"


@pytest.fixture
def client(address) -> Iterator[Client]:
    """A client that sends its samples at the rate of the recogniser."""
    with connect(address) as connection:
        client = Client(connection)
        [created] = client.hear("session.created")
        assert created["session"]["audio"]["input"]["format"] == {"type": "audio/pcm", "rate": 24000}
        assert client.update(format={"type": "audio/pcm", "rate": 16_000})["type"] == "session.updated"
        yield client


def heard(recognizer: Recognizer, samples: np.ndarray) -> str:
    return recognizer.transcribe(np.round(samples * 32768).astype(np.int16)).text


def test_a_pause_ends_an_item(client):
    client.speak(np.concatenate([noise(2.2), SILENCE, noise(0.8, 1), SILENCE]))
    first, second = client.completed(), client.completed()
    for events, start, end in ((first, 0, 2400), (second, 3000, 4200)):
        assert len({event["item_id"] for event in events}) == 1
        assert len({event["event_id"] for event in events}) == len(events)
        assert events[0]["audio_start_ms"] == pytest.approx(start, abs=40)
        assert events[-3]["audio_end_ms"] == pytest.approx(end, abs=40)
        assert events[-1]["transcript"]
        assert events[-1]["usage"] == {"type": "duration", "seconds": pytest.approx((end - start) / 1000, abs=0.08)}
    assert first[-2]["previous_item_id"] is None and second[-2]["previous_item_id"] == first[0]["item_id"]


def test_words_come_as_they_are_settled(client, monkeypatch):
    said = [
        Heard(start=0.5, tentative="a man"),
        Heard(start=0.5, settled="a man", tentative="with"),
        Heard(start=0.5, settled="a man with", tentative="a black"),
        Heard(start=0.5, settled="a man with a", tentative="bag"),
        Heard([Segment(0.5, 2.0, "a man with a dog", 0.0)]),
        Heard(start=3.0, tentative="cough"),
        Heard(),  # it was not speech
    ]

    def listen(own: Recognizer, blocks: Iterator[np.ndarray], *settings, **others) -> Iterator[Heard]:
        list(blocks)
        yield from said

    monkeypatch.setattr("asr.realtime.listen", listen)
    updated = client.update(turn_detection={"type": "server_vad", "threshold": 0.5, "silence_duration_ms": 300})
    turns = updated["session"]["audio"]["input"]["turn_detection"]
    assert turns == {"type": "server_vad", "silence_duration_ms": 300}
    client.speak(np.concatenate([SILENCE] * 4))
    client.say("input_audio_buffer.commit")
    told = [(e["type"].rsplit(".", 1)[1], e.get("delta", e.get("transcript"))) for e in client.completed()]
    deltas = [("delta", " with"), ("delta", " a")]
    ends = [("speech_stopped", None), ("committed", None)]
    assert told == [("speech_started", None), ("delta", "a man"), *deltas, *ends, ("completed", "a man with a dog")]
    events = client.completed()
    told = [(e["type"].rsplit(".", 1)[1], e.get("transcript")) for e in events]
    assert told == [("speech_started", None), *ends, ("completed", "")]
    assert events[0]["audio_start_ms"] == 3000 and events[1]["audio_end_ms"] == 4000
    assert events[-1]["usage"]["seconds"] == 1.0


def test_without_turn_detection_the_client_commits(client, served):
    sound = np.concatenate([noise(0.8), SILENCE, noise(0.8, 1)])
    assert client.update(turn_detection=None)["session"]["audio"]["input"]["turn_detection"] is None
    client.speak(sound)
    client.say("input_audio_buffer.commit")
    assert client.completed()[-1]["transcript"] == heard(served, sound) != ""
    client.speak(noise(0.7, 2))
    client.say("input_audio_buffer.commit")
    events = client.completed()
    assert events[0]["audio_start_ms"] == pytest.approx(2600, abs=40)
    assert events[-3]["audio_end_ms"] == pytest.approx(3300, abs=40)
    assert events[-1]["transcript"] == heard(served, noise(0.7, 2))


def test_without_turn_detection_an_update_ends_what_is_being_said(client, served):
    client.update(turn_detection=None)
    client.speak(noise(0.8))
    client.say("session.update", session={"type": "transcription", "audio": {"input": {}}})
    *item, updated = client.hear()
    assert item[-1]["type"] == f"{TRANSCRIPTION}.completed" and item[-1]["transcript"] == heard(served, noise(0.8))
    assert updated["type"] == "session.updated"


@pytest.mark.parametrize(
    ("most", "event"),
    [
        ("MOST_BYTES", {"type": "input_audio_buffer.append", "audio": "AAAA" * 10}),
        ("MOST_BLOCKS", {"type": "input_audio_buffer.append", "audio": "AAAA"}),
        ("MOST_MARKS", {"type": "session.update", "session": {}}),
    ],
)
def test_who_is_too_far_ahead_of_what_is_heard_is_told(client, monkeypatch, most, event):
    monkeypatch.setattr(f"asr.realtime.{most}", 5)
    at_work, go_on = threading.Event(), threading.Event()

    def tell(self, kind: str, **fields) -> None:
        at_work.set()
        go_on.wait(30)

    monkeypatch.setattr(Connection, "_tell", tell)
    client.say("input_audio_buffer.clear")
    assert at_work.wait(30)
    for _ in range(20):
        client.connection.send(json.dumps(event))
    threading.Timer(0.5, go_on.set).start()
    assert client.hear()[-1]["error"]["message"] == "the client is too far ahead of processing"
    with pytest.raises(ConnectionClosed) as closed:
        client.connection.recv(timeout=30)
    assert closed.value.rcvd.code == 1008


def test_an_empty_append_is_no_audio(address):
    with connect(address) as connection:
        client = Client(connection)
        client.hear("session.created")
        client.say("input_audio_buffer.append", audio="")
        client.say("input_audio_buffer.commit")
        assert "there is no audio in the buffer" in client.hear()[-1]["error"]["message"]


def test_a_commit_of_silence_is_answered(client):
    for before in (SILENCE, np.concatenate([noise(0.8), SILENCE])):
        client.speak(before)
        ends = 0
        if before.any():
            *_, stopped, _, completed = client.completed()
            assert completed["transcript"]  # ended by the pause
            ends = stopped["audio_end_ms"]
            client.speak(SILENCE)
        client.say("input_audio_buffer.commit")
        started, *_, completed = client.completed()
        assert completed["transcript"] == "" and started["audio_start_ms"] == ends


def test_a_commit_ends_what_is_being_said(client, served):
    client.speak(noise(0.8))
    client.say("input_audio_buffer.commit")
    assert client.completed()[-1]["transcript"] == heard(served, noise(0.8)) != ""


def test_a_commit_within_a_sample_parts_nothing(client, served):
    client.update(turn_detection=None)
    first, second = noise(0.8), noise(0.8, 1)
    raw = np.round(np.concatenate([first, second]) * 32768).astype("<i2").tobytes()
    for part in (raw[: 2 * len(first) + 1], raw[2 * len(first) + 1 :]):
        client.say("input_audio_buffer.append", audio=base64.b64encode(part).decode())
        client.say("input_audio_buffer.commit")
    assert [client.completed()[-1]["transcript"] for _ in range(2)] == [heard(served, first), heard(served, second)]


def test_what_is_cleared_is_not_heard(client, served):
    client.update(turn_detection=None)
    client.speak(noise(0.8))
    client.say("input_audio_buffer.clear")
    assert [event["type"] for event in client.hear("input_audio_buffer.cleared")] == ["input_audio_buffer.cleared"]
    client.speak(noise(0.8, 1))
    client.say("input_audio_buffer.commit")
    assert client.completed()[-1]["transcript"] == heard(served, noise(0.8, 1))


def test_what_is_said_after_a_clear_is_another_item(client, monkeypatch):
    def listen(own: Recognizer, blocks: Iterator[np.ndarray], *settings, **others) -> Iterator[Heard]:
        yield Heard(start=0.5, settled="a man")
        list(blocks)

    monkeypatch.setattr("asr.realtime.listen", listen)
    items = set()
    for _ in range(3):
        client.say("input_audio_buffer.clear")
        client.hear("input_audio_buffer.cleared")
        started, delta = client.hear(f"{TRANSCRIPTION}.delta")
        assert started["type"] == "input_audio_buffer.speech_started"
        items.add(delta["item_id"])
    assert len(items) == 3


def test_keywords_are_phrases(client, served):
    client.update(turn_detection=None)
    for keywords in ((), ("abab", "cdcd")):
        client.update(transcription={"model": "whisper-1", "language": "en", "keywords": keywords})
        client.speak(noise(0.8))
        client.say("input_audio_buffer.commit")
        assert client.completed()[-1]["transcript"] == heard(served.with_options(phrases=keywords), noise(0.8))


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ("{", "Expecting property name"),
        ("[]", "list indices must be"),
        ({"type": "session.update", "session": {"": 1}}, "session has no "),
        (b"\0\0", "Expecting value"),
        ("[" * 100_000, "maximum recursion depth"),
        ('{"type": "\\ud800"}', "\ud800: not an event that is known here"),
        ("{}", "type is missing"),
        ({"type": "response.create"}, "response.create: not an event that is known here"),
        ({"type": "input_audio_buffer.append", "audio": "§"}, "ASCII"),
        ({"type": "input_audio_buffer.append", "audio": "AA*A"}, "Only base64 data is allowed"),
        ({"type": "input_audio_buffer.append"}, "audio is missing"),
        ({"type": "input_audio_buffer.commit"}, "there is no audio in the buffer"),
        ({"type": "session.update", "session": []}, "session must be an object"),
        (
            {"type": "session.update", "session": {"type": "realtime"}},
            "session.type must be transcription, not realtime",
        ),
        ({"type": "session.update", "session": {"voice": "alloy"}}, "session has no voice"),
        ({"type": "session.update", "session": {"audio": {"output": {}}}}, "audio has no output"),
    ],
)
def test_an_event_that_cannot_be_is_an_error_and_the_session_goes_on(client, served, event, said):
    if isinstance(event, dict):
        event["event_id"] = "mine"
    client.connection.send(json.dumps(event) if isinstance(event, dict) else event)
    [answer] = client.hear()
    assert answer["type"] == "error" and answer["error"]["type"] == "invalid_request_error"
    assert said in answer["error"]["message"]
    assert answer["error"]["event_id"] == ("mine" if isinstance(event, dict) else None)
    client.speak(noise(0.8))
    client.say("input_audio_buffer.commit")
    assert client.completed()[-1]["transcript"] == heard(served, noise(0.8))


def test_what_an_update_does_not_name_stays_as_it_was():
    audio = {"format": {"type": "audio/pcm", "rate": 8000}, "transcription": {"keywords": ["Ghibli", " "]}}
    settings = Settings().updated({"audio": {"input": audio | {"turn_detection": None}}})
    assert settings == Settings(8000, None, ("Ghibli",))
    again = {"format": {"type": "audio/pcm"}, "transcription": {"language": "en"}, "noise_reduction": None}
    assert settings.updated({"audio": {"input": again}}) == settings
    for turns, pause in (({"silence_duration_ms": 300}, 0.3), ({"type": "server_vad", "idle_timeout_ms": None}, 0.3)):
        settings = settings.updated({"audio": {"input": {"turn_detection": turns}}})
        assert settings.pause == pause


@pytest.mark.parametrize(
    ("audio", "said"),
    [
        ({"format": {"type": "audio/pcmu"}}, "format must be audio/pcm with a rate between 8000 and 48000"),
        ({"format": {"type": "audio/pcm", "rate": 4000}}, "with a rate between 8000 and 48000"),
        (
            {"turn_detection": {"type": "semantic_vad"}},
            "turn_detection is null or of type server_vad, not semantic_vad",
        ),
        ({"turn_detection": {"silence_duration_ms": 100}}, "must lie between 200 and 60000, not 100"),
        ({"transcription": {"keywords": "Ghibli"}}, "keywords must be a list of texts"),
        ({"transcription": {"keywords": ["\ud800"]}}, "surrogates not allowed"),
    ],
)
def test_settings_that_cannot_be_are_refused(audio, said):
    with pytest.raises(ValueError, match=said):
        Settings().updated({"type": "transcription", "audio": {"input": audio}})


def test_more_keywords_than_phrases_of_a_request_are_refused(client):
    answer = client.update(transcription={"keywords": ["a"] * (MOST_PHRASES + 1)})
    assert "phrases: more than 1000" in answer["error"]["message"]


def test_more_connections_than_there_may_be_are_told_to_come_again(client, address, server):
    with connect(address) as second:
        second.recv(timeout=30)
        with connect(address) as third, pytest.raises(ConnectionClosed) as closed:
            third.recv(timeout=30)
        assert closed.value.rcvd.code == 1013
        assert requests.get(f"{server}/health", timeout=60).json() == {"status": "ok"}
    deadline = time.monotonic() + 30
    while True:  # until the server notices that the second is gone
        with connect(address) as again:
            try:
                assert json.loads(again.recv(timeout=30))["type"] == "session.created"
                return
            except ConnectionClosed:
                assert time.monotonic() < deadline
                time.sleep(0.05)


def test_who_goes_in_the_middle_of_a_word_leaves_nothing_behind(address, served):
    for _ in range(6):  # if these connections stayed, they would soon be too many
        with connect(address) as connection:
            client = Client(connection)
            client.hear("session.created")
            client.speak(np.concatenate([noise(3.0)] * 3))
        time.sleep(0.2)
    with connect(address) as connection:
        client = Client(connection)
        client.hear("session.created")
        client.update(turn_detection=None)


def test_a_fault_of_the_server_ends_the_session_with_a_reason(client, monkeypatch, caplog):
    def failing(self, inputs):
        raise RuntimeError("shape '[2, 3]' is invalid")

    monkeypatch.setattr(Recognizer, "recognize", failing)
    client.speak(noise(0.8))
    assert client.hear()[-1]["error"] == {"type": "server_error", "message": "the server failed, and has logged why"}
    assert "a realtime session failed" in caplog.text and "shape '[2, 3]' is invalid" in caplog.text
    with pytest.raises(ConnectionClosed) as closed:
        client.connection.recv(timeout=30)
    assert closed.value.rcvd.code == 1011


def test_who_does_not_read_is_gone(address, monkeypatch):
    send = Connection._send

    async def late(self: Connection, kind: str, **fields) -> None:
        await asyncio.sleep(0.5)
        await send(self, kind, **fields)

    monkeypatch.setattr("asr.realtime.SLOWEST", 0.1)
    monkeypatch.setattr(Connection, "_send", late)
    with connect(address) as connection:
        client = Client(connection)
        client.hear("session.created")
        client.say("input_audio_buffer.clear")
        assert client.hear()[-1]["error"]["message"] == "an event could not be sent within 0.1 s"
        with pytest.raises(ConnectionClosed) as closed:
            connection.recv(timeout=30)
        assert closed.value.rcvd.code == 1011
