import random

import numpy as np
import pytest
from lhotse import CutSet

from asr.audio.reading import read_audio, write_wav
from asr.corpus import open_corpus, read_cut
from asr.training.batches import Bucket, SpeechDataset
from asr.training.conditions import Conditions
from asr.training.config import SoundConfig
from asr.training.run import train
from tests.training.tones import options


@pytest.fixture
def speech(tone):
    return tone(1.0)


@pytest.fixture
def recordings(tmp_path):
    """Folders with two noises, one shorter than the speech, and an impulse response with an echo."""
    draw = np.random.default_rng(0)
    for name, seconds in (("noises/long", 3.0), ("noises/short", 0.2)):
        write_wav(tmp_path / f"{name}.wav", 0.1 * draw.standard_normal(int(seconds * 16000)).astype(np.float32))
    response = np.zeros(1600, np.float32)
    response[[40, 900]] = 0.8, 0.6
    write_wav(tmp_path / "rirs" / "hall.wav", response)
    return tmp_path


def conditions(folder, **probabilities) -> Conditions:
    """Conditions with the recordings that have a probability; accepts other options of SoundConfig, too."""
    corpora = {name: [str(folder / name)] for name in ("noises", "rirs") if f"{name[:-1]}_prob" in probabilities}
    return Conditions(SoundConfig(train=["x"], dev=["x"], **corpora, **probabilities))


def level(samples) -> float:
    return float(np.sqrt(np.mean(np.square(samples, dtype=np.float64))))


def test_noise_is_added_within_the_decibels_and_the_same_draw_adds_the_same(recordings, speech):
    noisy = conditions(recordings, noise_prob=1.0, snr=[10.0, 14.0])
    ratios = []
    for seed in range(20):
        heard, again = (noisy(speech, random.Random(seed)) for _ in range(2))
        np.testing.assert_array_equal(heard, again)
        ratios.append(20 * np.log10(level(speech) / level(heard - speech)))
    assert 10 <= min(ratios) < 11.5 and 12.5 < max(ratios) <= 14


def test_an_echo_is_added_and_the_speech_is_not_late(recordings, speech):
    heard = conditions(recordings, rir_prob=1.0)(speech, random.Random(0))
    before, after = heard[:860], heard[860:2000]  # the echo comes 860 samples after the direct sound
    np.testing.assert_allclose(before / level(before), speech[:860] / level(speech[:860]), atol=0.02)
    expected = speech[860:2000] + 0.75 * speech[:1140]
    np.testing.assert_allclose(after / level(after), expected / level(expected), atol=0.02)
    write_wav(recordings / "rirs" / "hall.wav", -read_audio(recordings / "rirs" / "hall.wav"))  # as microphones differ
    np.testing.assert_allclose(conditions(recordings, rir_prob=1.0)(speech, random.Random(0)), -heard, atol=1e-3)


def test_of_a_long_noise_so_much_is_read_as_there_is_speech_from_anywhere(recordings, speech, monkeypatch):
    parts = []
    monkeypatch.setattr("asr.training.conditions.read_cut", lambda cut: parts.append(cut) or read_cut(cut))
    (recordings / "noises" / "short.wav").unlink()
    noisy = conditions(recordings, noise_prob=1.0)
    for seed in range(20):
        noisy(speech, random.Random(seed))
    begins = [part.start for part in parts]
    assert {part.duration for part in parts} == {1.0} and min(begins) < 0.4 and 1.6 < max(begins) <= 2.0


def test_each_meets_with_its_share_of_the_utterances(recordings, speech):
    some = conditions(recordings, noise_prob=0.3)
    changed = [not np.array_equal(some(speech, random.Random(seed)), speech) for seed in range(300)]
    assert 60 < sum(changed) < 120


def test_without_recordings_an_utterance_stays_as_it_is(recordings, speech):
    assert conditions(recordings)(speech, random.Random(0)) is speech


def test_a_recording_that_cannot_be_read_is_left_out_by_name(recordings, speech, caplog):
    noisy = conditions(recordings, noise_prob=1.0)
    for path in (recordings / "noises").iterdir():
        path.write_bytes(b"no sound")
    for seed in range(20):
        np.testing.assert_array_equal(noisy(speech, random.Random(seed)), speech)
    assert sorted(record.args[0] for record in caplog.records) == ["long", "short"]  # once each


def test_silence_is_neither_a_room_nor_noise(recordings, speech):
    for path in (recordings / "rirs" / "hall.wav", *(recordings / "noises").iterdir()):
        write_wav(path, np.zeros(1600, np.float32))
    quiet = conditions(recordings, noise_prob=1.0, rir_prob=1.0)
    np.testing.assert_array_equal(quiet(speech, random.Random(0)), speech)


def test_what_is_no_sound_is_refused(tmp_path):
    np.save(tmp_path / "matrix.npy", np.zeros((5, 80), np.float32))
    with pytest.raises(ValueError, match="data.noises: matrix is matrix"):
        Conditions(SoundConfig(train=["x"], dev=["x"], noises=[str(tmp_path)], noise_prob=0.5))


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no audio file"):
        Conditions(SoundConfig(train=["x"], dev=["x"], noises=[str(tmp_path)], noise_prob=0.5))


@pytest.mark.parametrize(
    ("option", "what"),
    [
        ("distortion.room=0.5", "distortion"),
        ("data.codec=0.5", "data.codec"),
        ("data={noises: [x], noise_prob: 0.5}", "data.noises"),
        ("data={rirs: [x], rir_prob: 0.5}", "data.rirs"),
    ],
)
def test_what_is_of_sound_is_refused_where_there_is_none(tmp_path, option, what):
    for part in ("train", "dev"):
        (tmp_path / part).mkdir()
        np.save(tmp_path / part / "a.npy", np.ones((200, 7), np.float32))
        (tmp_path / part / "a.txt").write_text("one")
    matrix = ["features.kind=matrix", "features.dim=7"]
    with pytest.raises(ValueError, match=f"^{what} is for sound, but this model takes matrix"):
        train(options(tmp_path, tmp_path / "exp", *matrix, option))


def test_batches_that_processes_have_at_once_play_at_one_speed_under_conditions_of_their_own(corpus, monkeypatch):
    drawn = []
    monkeypatch.setattr(Conditions, "__call__", lambda self, sound, draw: drawn.append(draw.random()) or sound)
    cuts = list(open_corpus(corpus / "train"))
    noisy = Conditions(SoundConfig(train=["x"], dev=["x"]))
    dataset = SpeechDataset(None, [0.9, 1.0, 1.1], [Bucket(10.0, 1)], conditions=noisy)
    a, again, b = (dataset[CutSet.from_cuts([cut]), 7] for cut in (cuts[0], cuts[0], cuts[1]))
    assert a.speed == again.speed == b.speed
    assert drawn[0] == drawn[1] != drawn[2]


def test_the_training_meets_with_them_and_the_validation_does_not(recordings, corpus, monkeypatch):
    heard, call = [], Conditions.__call__

    def watched(self, samples, draw):
        heard.append(not np.array_equal(samples, noisy := call(self, samples, draw)))
        return noisy

    monkeypatch.setattr(Conditions, "__call__", watched)
    noises = [f"data.noises=[{recordings / 'noises'}]", "data.noise_prob=1.0", "data.workers=0"]
    train(options(corpus, recordings / "exp", "epochs=1", *noises))
    assert heard == 30 * [True]  # each utterance of the training set, once
