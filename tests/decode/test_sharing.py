"""Requests from several threads share a recogniser's batches, and nothing else."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import soundfile
import torch

from asr.audio.config import FeatureConfig
from asr.audio.reading import SAMPLE_RATE
from asr.decode import segments
from asr.decode.options import DecodeOptions, Hypothesis
from asr.decode.recognizer import Recognizer
from asr.decode.segments import FRAME
from asr.decode.sharing import Abandoned, SharedRecognizer
from asr.model.speech_model import SpeechModel
from asr.model.transformer import Transformer
from asr.text.tokenizer import CharTokenizer
from tests.conftest import LETTERS
from tests.decode.test_recognizer import noise


class Slow(Recognizer):
    """A recogniser that waits for `go_on` before each batch and records the batches."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.batches: list[list[float]] = []  # seconds of each piece
        self.began, self.go_on = threading.Semaphore(0), threading.Semaphore(0)

    def recognize(self, inputs: list[np.ndarray]) -> list[list[Hypothesis]]:
        self.batches.append([len(x) / SAMPLE_RATE for x in inputs])
        self.began.release()
        assert self.go_on.acquire(timeout=30)
        return super().recognize(inputs)


@pytest.fixture
def slow(tiny_model, noise_is_heard, monkeypatch) -> Slow:
    monkeypatch.setattr(segments, "speech_probabilities", lambda samples: np.full(-(-len(samples) // FRAME), 0.9))
    with torch.no_grad():
        tiny_model.transformer.ctc.weight.mul_(5)
    return Slow(tiny_model, DecodeOptions(beam_size=3), batch_seconds=6, precision="float32", piece_seconds=3)


@pytest.fixture
def pool(slow):
    with ThreadPoolExecutor(8) as pool:
        yield pool
        slow.go_on.release(1000)


def waiting(shared: SharedRecognizer, count: int) -> None:
    """Waits until `count` pieces are waiting."""
    with shared._changed:
        assert shared._changed.wait_for(lambda: len(shared._waiting) >= count, timeout=30)


def test_what_comes_while_a_batch_is_decoded_is_decoded_in_one(slow, pool):
    sounds = [noise(seconds, seed) for seed, seconds in enumerate((2.0, 1.0, 2.0, 1.5))]
    shared = SharedRecognizer(slow)
    transcripts = [pool.submit(shared.transcribe, sounds[0])]
    slow.began.acquire()
    for i, sound in enumerate(sounds[1:], 1):
        transcripts.append(pool.submit(shared.transcribe, sound))
        waiting(shared, i)
    slow.go_on.release(8)
    found = [transcript.result() for transcript in transcripts]
    assert slow.batches == [[2.0], [2.0, 1.5, 1.0]]  # three of at most two seconds fill a batch of six
    for transcript, sound in zip(found, sounds, strict=True):
        alone = slow.transcribe(sound)
        assert transcript.text == alone.text and transcript.duration == alone.duration
        assert transcript.segments[0].score == pytest.approx(alone.segments[0].score, abs=1e-4)


def test_who_asks_for_the_times_of_words_gets_them_beside_who_does_not(slow, pool):
    plain, slow.word_times = slow.with_options(), True
    shared = SharedRecognizer(slow)
    first = pool.submit(shared.transcribe, noise(1.0))
    slow.began.acquire()
    asked = [pool.submit(shared.recognize, own, [noise(1.0, 1)]) for own in (plain, slow)]
    waiting(shared, 2)
    slow.go_on.release(8)
    [[without], [timed]] = (found.result()[0] for found in asked)
    assert first.result().text and not without.spans and timed.spans


def test_a_batch_is_no_longer_than_the_recognisers(slow, pool):
    shared = SharedRecognizer(slow)
    transcripts = [pool.submit(shared.transcribe, noise(2.0))]
    slow.began.acquire()
    for i, seconds in enumerate((1.0, 3.0, 2.5, 0.5), 1):
        transcripts.append(pool.submit(shared.transcribe, noise(seconds)))
        waiting(shared, i)
    slow.go_on.release(8)
    assert all(transcript.result().segments for transcript in transcripts)
    assert slow.batches == [[2.0], [3.0, 1.0], [2.5, 0.5]]  # padded to its longest piece, each has at most six seconds


def test_requests_of_other_options_have_batches_of_their_own(slow, pool):
    shared = SharedRecognizer(slow)
    asked = slow.with_options(phrases=["abab"], phrase_weight=50.0)
    transcripts = [pool.submit(shared.transcribe, noise(2.0))]
    slow.began.acquire()
    for i, own in enumerate((None, asked, None), 1):
        transcripts.append(pool.submit(shared.transcribe, noise(2.0), own))
        waiting(shared, i)
    slow.go_on.release(8)
    first, second, other, third = (transcript.result() for transcript in transcripts)
    assert slow.batches == [[2.0], [2.0, 2.0], [2.0]]
    assert first.text == second.text == third.text
    assert "abab" in other.text.replace(" ", "") and "abab" not in first.text.replace(" ", "")


def test_a_long_recording_does_not_hold_up_a_short_one(slow, pool):
    shared = SharedRecognizer(slow)
    long = pool.submit(shared.transcribe, noise(60.0))
    slow.began.acquire()
    short = pool.submit(shared.transcribe, noise(1.0, seed=1))
    slow.go_on.release(4)
    short.result(timeout=30)
    assert not long.done()
    slow.go_on.release(60)
    assert long.result().duration == 60.0
    assert [segment.start for segment in long.result().segments] == sorted(s.start for s in long.result().segments)


def test_a_long_recording_is_decoded_in_whole_batches(slow):
    slow.go_on.release(100)
    transcript = SharedRecognizer(slow).transcribe(noise(60.0))
    assert len(transcript.segments) == sum(map(len, slow.batches))
    assert {len(batch) for batch in slow.batches[:-1]} == {2}  # batches of six seconds, pieces of up to three


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), SystemExit(1)])
def test_what_fails_is_told_and_the_next_is_decoded(slow, monkeypatch, error):
    shared = SharedRecognizer(slow)

    def failing(inputs):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(slow, "recognize", failing)
        with pytest.raises(RuntimeError, match=re.escape(str(error))):
            shared.transcribe(noise(1.0))
        assert not shared.works()  # its own attempt fails, too
    slow.go_on.release(2)
    assert shared.works() and shared.transcribe(noise(1.0)).segments


def test_a_piece_that_fails_does_not_take_the_others_of_its_batch_with_it(slow, pool, monkeypatch):
    shared, batches = SharedRecognizer(slow), []

    def recognize(inputs):
        batches.append([len(x) / SAMPLE_RATE for x in inputs])
        if 1.5 in batches[-1]:
            raise RuntimeError("1.5 is too much")
        return slow.recognize(inputs)

    transcripts = [pool.submit(shared.transcribe, noise(1.0))]
    slow.began.acquire()
    own = slow.with_options()
    monkeypatch.setattr(own, "recognize", recognize)
    for i, seconds in enumerate((2.0, 1.5, 1.0), 1):
        transcripts.append(pool.submit(shared.transcribe, noise(seconds), own))
        waiting(shared, i)
    slow.go_on.release(8)
    with pytest.raises(RuntimeError, match="too much"):
        transcripts.pop(2).result()
    assert all(transcript.result().segments for transcript in transcripts)
    assert batches == [[2.0, 1.5, 1.0], [2.0], [1.5], [1.0]]


def test_of_a_request_that_nobody_waits_for_nothing_more_is_read_or_decoded(slow, pool, tmp_path):
    shared = SharedRecognizer(slow)
    gone = threading.Event()
    long = pool.submit(shared.transcribe, noise(60.0), gone=gone)
    slow.began.acquire()
    gone.set()
    slow.go_on.release(8)
    with pytest.raises(Abandoned):
        long.result(timeout=60)
    assert len(slow.batches) == 1
    soundfile.write(tmp_path / "silence.wav", np.zeros(600 * SAMPLE_RATE), SAMPLE_RATE)
    with pytest.raises(Abandoned):
        shared.transcribe(tmp_path / "silence.wav", gone=gone)
    assert shared.transcribe(noise(1.0)).segments


def test_of_what_is_longer_than_is_taken_the_beginning_is_transcribed(slow, tmp_path):
    soundfile.write(tmp_path / "long.wav", noise(70.0), SAMPLE_RATE)
    slow.go_on.release(100)
    transcript = SharedRecognizer(slow).transcribe(tmp_path / "long.wav", max_seconds=40.0)
    assert transcript.error.endswith("long.wav: longer than 40 s")
    assert 20 < transcript.segments[-1].end <= 40


def test_what_a_damaged_file_has_before_its_end_is_transcribed(slow, tmp_path):
    slow.go_on.release(8)
    soundfile.write(tmp_path / "whole.wav", noise(5.0), SAMPLE_RATE)
    (tmp_path / "cut.wav").write_bytes((tmp_path / "whole.wav").read_bytes()[:-20_000])
    shared = SharedRecognizer(slow)
    transcript = shared.transcribe(tmp_path / "cut.wav")
    assert "cut off" in transcript.error and transcript.text
    assert "no such file" in shared.transcribe(tmp_path / "none.wav").error


@pytest.mark.parametrize("kind", ["matrix", "text"])
def test_models_of_other_inputs_have_a_limit_and_are_tried_again(tiny_config, kind):
    shape = {"subsampler": "linear" if kind == "matrix" else "embedding", "subsampling": 1, "input_dim": 12}
    config = replace(tiny_config, encoder="transformer", **shape)
    model = SpeechModel(FeatureConfig(kind, 12), Transformer(config), CharTokenizer(LETTERS))
    shared = SharedRecognizer(Recognizer(model, DecodeOptions(beam_size=2)))
    long = np.ones((500, 12), np.float32) if kind == "matrix" else 500 * "a"
    assert shared.transcribe(long, max_seconds=1).error.endswith(": longer than 1 s")
    shared._fails = True
    assert shared.works()
