import sys
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from asr.audio.features import QUIET, SILENCE
from asr.audio.reading import SAMPLE_RATE, read_audio
from asr.corpus import iterate, open_corpus
from asr.decode import segments
from asr.decode.segments import (
    FRAME,
    LONGEST,
    SPEECH,
    Cutter,
    SpeechDetector,
    _Tape,
    cut_at_pauses,
    has_speech,
    speech_probabilities,
)
from asr.resources import resource


def in_blocks(samples: np.ndarray, size: int = 100_000):
    return iter([samples[i : i + size] for i in range(0, len(samples), size)])


def loudness(samples: np.ndarray) -> np.ndarray:
    """A detector that takes anything loud for speech, so that the cutting is tested without the real detector."""
    frames = -(-len(samples) // FRAME)
    padded = np.pad(samples, (0, frames * FRAME - len(samples))).reshape(frames, FRAME)
    return (np.abs(padded).mean(axis=1) > 0.01).astype(np.float32) * 0.9


@pytest.fixture
def loud_is_speech(monkeypatch):
    monkeypatch.setattr(segments, "speech_probabilities", loudness)


def talk(*seconds: float) -> np.ndarray:
    """Speech and pauses of these lengths in turn."""
    parts = [(0.1 if i % 2 == 0 else 0.0) * np.ones(round(s * SAMPLE_RATE), np.float32) for i, s in enumerate(seconds)]
    return np.concatenate(parts)


def test_a_short_sound_is_one_piece(tone):
    pieces = list(cut_at_pauses(in_blocks(tone(LONGEST))))
    assert [piece.start for piece in pieces] == [0.0]
    assert len(pieces[0].samples) == LONGEST * SAMPLE_RATE


def test_no_sound_is_no_piece():
    assert list(cut_at_pauses(iter([]))) == []


def test_long_speech_is_cut_in_its_pauses(loud_is_speech):
    pieces = list(cut_at_pauses(in_blocks(talk(12, 0.5, 12, 0.5, 12))))
    assert [round(piece.start + len(piece.samples) / SAMPLE_RATE, 1) for piece in pieces[:2]] == pytest.approx(
        [12.25, 24.75], abs=0.1
    )
    assert pieces[-1].start + len(pieces[-1].samples) / SAMPLE_RATE == pytest.approx(37.0, abs=0.1)


def test_no_speech_is_lost_and_none_is_doubled(loud_is_speech):
    rng = np.random.default_rng(0)
    sound = talk(*(x for _ in range(150) for x in (rng.uniform(0.5, 9), rng.uniform(0.1, 4))))
    assert len(sound) > 16 * 30 * SAMPLE_RATE  # several windows
    covered = np.zeros(len(sound), int)
    for piece in cut_at_pauses(in_blocks(sound)):
        start = round(piece.start * SAMPLE_RATE)
        assert len(piece.samples) <= LONGEST * SAMPLE_RATE
        assert np.array_equal(piece.samples, sound[start : start + len(piece.samples)])
        assert piece.samples.base is None  # a view would keep more audio in memory than the piece has
        covered[start : start + len(piece.samples)] += 1
    assert covered.max() == 1
    assert covered[sound > 0].min() == 1
    assert covered[sound == 0].mean() < 0.5


def test_a_long_pause_ends_a_piece(loud_is_speech):
    pieces = list(cut_at_pauses(in_blocks(talk(3, 5, 3, 5, 3, 5))))
    starts, lengths = zip(*((piece.start, len(piece.samples) / SAMPLE_RATE) for piece in pieces), strict=True)
    assert starts == pytest.approx([0, 7.8, 15.8], abs=0.1)
    assert lengths == pytest.approx([3.2, 3.4, 3.4], abs=0.1)


@pytest.mark.parametrize("size", [100, 3_333, 50_000])
def test_what_is_cut_while_it_comes_in_is_cut_as_the_whole(loud_is_speech, size):
    rng = np.random.default_rng(1)
    sound = talk(*(x for _ in range(12) for x in (rng.uniform(0.5, 30), rng.uniform(0.1, 4))))
    cutter = Cutter()
    found = [piece for block in in_blocks(sound, size) for piece in cutter.cut(block)]
    found += cutter.cut(np.zeros(0, np.float32), last=True)
    whole = list(cut_at_pauses(in_blocks(sound)))
    assert len(found) == len(whole) > 12
    for piece, expected in zip(found, whole, strict=True):
        assert piece.start == expected.start and np.array_equal(piece.samples, expected.samples)


def test_a_piece_is_there_as_soon_as_its_pause_is_long_enough(loud_is_speech):
    cutter = Cutter(pause=0.5)
    found = []
    for i, block in enumerate(in_blocks(talk(3, 2, 3), SAMPLE_RATE // 10), 1):
        found += [(i / 10, piece.start + len(piece.samples) / SAMPLE_RATE) for piece in cutter.cut(block)]
        assert cutter.speaks == (i / 10 <= 3.5 or i / 10 > 5.0), i
    assert found == [(pytest.approx(3.5, abs=0.11), pytest.approx(3.2, abs=0.05))]


def test_silence_is_dropped(loud_is_speech):
    pieces = list(cut_at_pauses(in_blocks(talk(0.0, 60.0))))
    assert pieces == []


def test_speech_without_a_pause_is_cut_all_the_same(loud_is_speech):
    pieces = list(cut_at_pauses(in_blocks(talk(70.0))))
    assert sum(len(piece.samples) for piece in pieces) == 70 * SAMPLE_RATE
    assert max(len(piece.samples) for piece in pieces) <= LONGEST * SAMPLE_RATE


def test_a_long_array_is_not_copied_for_each_window():
    tape = _Tape(iter([np.zeros(5_000_000, np.float32)]))
    tracemalloc.start()
    windows = [tape.take(1000) for _ in range(3)]
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [len(window) for window in windows] == [1000] * 3
    assert most < 1_000_000


def test_the_detector_leaves_the_number_of_threads_as_it_was(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("silero_vad")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(segments, "_own", threading.local())
    torch.set_num_threads(2)
    try:
        assert len(segments.speech_probabilities(np.zeros(10_000, np.float32))) == 20
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_nor_does_it_change_in_between(monkeypatch):
    """A thread that computes for the first time during a change would keep the changed number."""
    for name in [name for name in sys.modules if name.startswith("silero_vad")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(segments, "_own", threading.local())
    changes = []
    monkeypatch.setattr(torch, "set_num_threads", changes.append)
    assert len(segments.speech_probabilities(np.zeros(10_000, np.float32))) == 20
    assert not changes and torch.set_num_threads == changes.append


@pytest.mark.filterwarnings("error")
def test_the_detector_loads_where_warnings_are_errors():
    assert SpeechDetector()(np.zeros(FRAME, np.float32)) < SPEECH


def test_threads_hear_what_each_would_hear_alone():
    samples = [read_audio(resource("data", "samples", name)) for name in ("corner.flac", "glass.flac")]
    sounds = [np.tile(sound, 40 * SAMPLE_RATE // len(sound)) for sound in samples]
    alone = [segments.speech_probabilities(sound) for sound in sounds]
    with ThreadPoolExecutor(len(sounds)) as pool:
        together = list(pool.map(segments.speech_probabilities, sounds))
    for heard, expected in zip(together, alone, strict=True):
        np.testing.assert_allclose(heard, expected, atol=1e-5)


def test_the_detector_hears_quiet_speech_as_well():
    sound = read_audio(resource("data", "samples", "glass.flac"))
    sound *= QUIET / np.abs(sound).max()
    quiet = speech_probabilities(sound * 2 * SILENCE / QUIET)
    np.testing.assert_allclose(quiet, speech_probabilities(sound), atol=1e-4)


def test_a_quiet_speaker_is_heard_beside_a_loud_one():
    sound = read_audio(resource("data", "samples", "glass.flac"))
    loud, quiet = 0.5 / np.abs(sound).max() * sound, 0.005 / np.abs(sound).max() * sound
    pause = np.zeros(SAMPLE_RATE, np.float32)
    pieces = list(cut_at_pauses(in_blocks(np.concatenate([loud, pause, quiet, pause] * 3))))
    lengths = [len(piece.samples) for piece in pieces]
    assert len(pieces) == 6
    assert min(lengths) > 0.8 * max(lengths)


def test_a_click_does_not_make_quiet_speech_unheard():
    sound = read_audio(resource("data", "samples", "glass.flac"))
    sound *= 0.003 / np.abs(sound).max()
    clicked = sound.copy()
    clicked[len(sound) // 2 :][:5] = 0.9
    assert has_speech(clicked)
    found = speech_probabilities(clicked) > SPEECH
    assert np.mean(found == (speech_probabilities(sound) > SPEECH)) > 0.9


@pytest.mark.parametrize("level", [0.3, 0.003])
def test_speech_is_told_from_music_and_noise(level):
    rng, t = np.random.default_rng(0), np.arange(SAMPLE_RATE // 2) / SAMPLE_RATE
    hertz = 110 * 2 ** (rng.integers(24, size=20) / 12)
    music = np.concatenate([sum(np.sin(2 * np.pi * k * f * t) / k for k in (1, 2, 3)) * np.exp(-4 * t) for f in hertz])
    noise = rng.normal(size=10 * SAMPLE_RATE)
    speech = read_audio(resource("data", "samples", "glass.flac"))
    heard = [has_speech((level * x / np.abs(x).max()).astype(np.float32)) for x in (speech, music, noise)]
    assert heard == [True, False, False]


def test_the_detector_hears_real_speech_and_not_the_noise_between(speech):
    rng = np.random.default_rng(0)
    parts, spoken, length = [], [], 0
    for _, sound in list(iterate(open_corpus(speech / "an4.test.tar")[:20])):
        silence = rng.normal(0, 1e-4, 5 * SAMPLE_RATE).astype(np.float32)
        spoken.append((length + len(silence), length + len(silence) + len(sound)))
        parts += [silence, sound]
        length += len(silence) + len(sound)
    pieces = list(cut_at_pauses(in_blocks(np.concatenate(parts))))
    heard = np.zeros(length, bool)
    for piece in pieces:
        heard[round(piece.start * SAMPLE_RATE) :][: len(piece.samples)] = True
    assert heard.mean() < 0.5
    assert np.mean([heard[a:b].mean() for a, b in spoken]) > 0.7


def test_a_detector_hears_what_comes_in_as_it_hears_the_whole():
    sound = np.tile(read_audio(resource("data", "samples", "glass.flac")), 3)
    detector, size = SpeechDetector(), 16 * FRAME
    heard = np.concatenate([detector(block) for block in in_blocks(sound, size)])
    whole = speech_probabilities(sound)
    assert heard.shape == whole.shape
    assert np.mean((heard >= SPEECH) == (whole >= SPEECH)) > 0.97
    assert list(Cutter(judge=SpeechDetector()).cut(np.zeros(0, np.float32), last=True)) == []


def test_a_pause_is_not_amplified_as_a_quiet_speaker_would_be(monkeypatch):
    monkeypatch.setattr(segments, "_new_detector", lambda: lambda frame, rate: frame.abs().max())
    loud, quiet = (np.tile(np.float32([level, -level]), 4 * FRAME) for level in (0.3, 0.001))
    detector = SpeechDetector()
    assert detector(loud) == pytest.approx(0.3) and detector(quiet) == pytest.approx(0.001)
    assert SpeechDetector()(quiet).min() > 0.01


def test_samples_of_a_larger_scale_are_reduced_for_the_detector_and_clicks_are_clipped():
    sound = np.random.default_rng(0).normal(0, 0.1, 3 * segments.STRETCH).astype(np.float32)
    lowered = segments._raised(32_768 * sound).numpy()
    assert np.corrcoef(lowered, sound)[0, 1] > 0.99 and np.abs(lowered).max() == 1
    assert np.mean(np.abs(lowered) == 1) < 0.01
    sound[5000] = 20
    clicked = segments._raised(sound).numpy()
    assert clicked[5000] == 1 and np.array_equal(np.delete(clicked, 5000), np.delete(sound, 5000))
