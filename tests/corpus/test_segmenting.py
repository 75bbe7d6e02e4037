from itertools import pairwise

import numpy as np
import pytest
from lhotse import CutSet, MonoCut, Recording, SupervisionSegment
from lhotse.audio import AudioSource
from lhotse.supervision import AlignmentItem

from asr.corpus.segmenting import EARLIEST, MARGIN, segment


def talk(gaps, start=0.0):
    """A recording of words of 0.4 s, each after one of `gaps` (seconds), with a second of silence at the end."""
    words, place = [], 0.0
    for i, gap in enumerate(gaps):
        words.append(AlignmentItem(f"w{i}", round(place + gap, 3), 0.4))
        place += gap + 0.4
    source = AudioSource("file", [0], "talk.wav")
    recording = Recording("talk", [source], 16000, int((start + place + 1) * 16000), start + place + 1)
    said = SupervisionSegment(
        "talk", "talk", 0, place + 1, text="", speaker="s", language="en", alignment={"word": words}
    )
    return MonoCut("talk", start, place + 1, 0, [said], recording=recording)


def test_every_word_is_in_one_part_at_its_own_place_and_no_part_is_too_long():
    gaps = np.random.default_rng(0).exponential(0.3, 300).round(3)
    cut = talk(gaps, start=2.0)
    parts = list(segment(cut, 10.0))
    words = [word for part in parts for word in part.supervisions[0].alignment["word"]]
    assert [word.symbol for word in words] == [f"w{i}" for i in range(300)]
    assert " ".join(part.supervisions[0].text for part in parts) == " ".join(word.symbol for word in words)
    assert max(part.duration for part in parts) <= 10.0 + 1e-3
    for part, said in ((part, part.supervisions[0].alignment["word"]) for part in parts):
        assert said[0].start >= 0 and said[-1].end <= part.duration + 2e-3
    assert len({part.id for part in parts}) == len(parts)
    assert {(part.supervisions[0].speaker, part.supervisions[0].language) for part in parts} == {("s", "en")}
    there = [part.start + word.start for part in parts for word in part.supervisions[0].alignment["word"]]
    wanted = [cut.start + word.start for word in cut.supervisions[0].alignment["word"]]
    assert there == pytest.approx(wanted, abs=2e-3)
    assert all(before.end <= after.start + 1e-3 for before, after in pairwise(parts))


def test_a_part_ends_in_the_longest_pause_that_it_reaches():
    gaps = [0.1] * 40
    gaps[5] = 3.0  # too early: a part would have hardly any words
    gaps[11] = 0.9
    gaps[13] = 3.0  # too early for the second part
    gaps[16] = 0.9
    first, second, *_ = segment(talk(gaps), 10.0)
    assert first.supervisions[0].text.split()[-1] == "w10" and first.duration >= EARLIEST * 10.0
    assert second.supervisions[0].text.split()[-1] == "w15"
    assert second.supervisions[0].alignment["word"][0].start == pytest.approx(MARGIN)  # this much of the pause stays


def test_words_before_a_pause_that_is_longer_than_a_part_stay_together():
    assert [part.supervisions[0].text for part in segment(talk([0.1, 0.1, 20.0]), 10.0)] == ["w0 w1", "w2"]


def test_a_word_that_is_longer_than_a_part_may_be_is_one_by_itself():
    assert [part.supervisions[0].text for part in segment(talk([0.1] * 3), 0.3)] == ["w0", "w1", "w2"]


def test_letters_of_a_script_without_spaces_stay_together():
    cut = talk([0.1] * 3)
    words = cut.supervisions[0].alignment["word"]
    words[:] = [word._replace(symbol=letter) for word, letter in zip(words, "你好吗", strict=True)]
    (only,) = segment(cut, 10.0)
    assert only.supervisions[0].text == "你好吗"


def test_silence_around_all_of_it_is_left_out():
    (only,) = segment(talk([4.0, 0.2]), 10.0)
    assert only.start == pytest.approx(4.0 - MARGIN) and only.duration == pytest.approx(1.0 + 2 * MARGIN)


def test_a_matrix_is_not_cut(tmp_path):
    cut = talk([0.1])
    cut.recording, cut.custom = None, {"matrix": str(tmp_path / "a.npy"), "width": 8}
    with pytest.raises(ValueError, match="talk: only audio can be cut, and this is matrix"):
        next(segment(cut, 10.0))


def test_words_without_times_are_an_error():
    cut = talk([0.1])
    cut.supervisions[0].alignment = None
    with pytest.raises(ValueError, match="talk: the times of its words are unknown"):
        next(segment(cut, 10.0))


def test_the_command_writes_cuts_that_can_be_read(tmp_path, tone, monkeypatch, capsys):
    from asr.audio.reading import write_wav
    from asr.corpus import iterate, open_corpus
    from tests.corpus.test_main import run

    cut = talk([0.3] * 20)
    cut.recording.sources[0].source = str(tmp_path / "talk.wav")
    write_wav(tmp_path / "talk.wav", tone(cut.duration))
    CutSet.from_cuts([cut]).to_file(tmp_path / "aligned.jsonl.gz")
    run(
        "segment",
        tmp_path / "aligned.jsonl.gz",
        "--seconds",
        "5",
        "--out",
        tmp_path / "new.jsonl.gz",
        monkeypatch=monkeypatch,
    )
    cuts = open_corpus(tmp_path / "new.jsonl.gz")
    assert len(cuts) > 2 and f"{len(cuts)} utterances" in capsys.readouterr().out
    for part, samples in iterate(cuts):
        assert len(samples) == round(part.duration * 16000)
