import random
from itertools import permutations

import numpy as np
import pytest
from lhotse import CutSet
from lhotse.supervision import AlignmentItem

from asr.audio.reading import SAMPLE_RATE, read_audio, write_wav
from asr.corpus import Utterance, make_cuts, open_corpus
from asr.corpus.__main__ import main
from asr.corpus.splicing import APART, FADE, WINDOW, Spoken, _is_apart, _runs, join, quietest, splice

PITCH = {"low": 200.0, "middle": 800.0, "high": 3200.0}


@pytest.fixture
def spoken(tmp_path, tone):
    """Makes cuts in which each word is a 0.3 s tone of its own pitch, with 0.2 s of silence around it by default."""

    def make(*texts: str, speakers: str | None = None, gap: float = 0.2) -> CutSet:
        utterances, times = [], []
        silence = np.zeros(round(gap * SAMPLE_RATE), np.float32)
        for i, text in enumerate(texts):
            parts, items = [silence], []
            for word in text.split():
                items.append(AlignmentItem(word, sum(map(len, parts)) / SAMPLE_RATE, 0.3))
                parts += [tone(0.3, PITCH[word]), silence]
            write_wav(tmp_path / f"u{i}.wav", np.concatenate(parts))
            utterances.append(Utterance(f"u{i}", tmp_path / f"u{i}.wav", text, speakers[i] if speakers else "a"))
            times.append(items)
        cuts = make_cuts(utterances, "words")
        for cut, items in zip(cuts, times, strict=True):
            cut.supervisions[0].alignment = {"word": items}
        return cuts

    return make


def heard(samples: np.ndarray) -> str:
    """The words of audio from `spoken`, recognised by the pitch of each loud stretch."""
    words, loud = [], np.abs(samples) > 0.01
    loud = np.convolve(loud, np.ones(400), "same") > 0
    edges = np.flatnonzero(np.diff(loud.astype(int), prepend=0, append=0))
    for first, end in edges.reshape(-1, 2):
        spectrum = np.abs(np.fft.rfft(samples[first:end]))
        pitch = np.argmax(spectrum) * SAMPLE_RATE / (end - first)
        words.append(min(PITCH, key=lambda word: abs(PITCH[word] - pitch)))
    return " ".join(words)


def test_sound_and_transcript_change_alike(spoken):
    cuts = spoken("low low high", "middle high low", "high middle middle")
    texts = []
    for seed in range(10):
        for _, text, samples in splice(cuts, 0.5, random.Random(seed)):
            assert heard(samples) == text
            texts.append(text)
    assert len(set(texts)) > 10


def test_without_a_replacement_the_sound_is_what_it_was(spoken):
    cuts = spoken("low high middle")
    [(cut, text, samples)] = splice(cuts, 0.0, random.Random(0))
    assert text == "low high middle"
    np.testing.assert_array_equal(samples, read_audio(cut.recording.sources[0].source))


def test_words_that_were_neighbours_are_not_cut_apart(spoken):
    one, other = spoken("low", "high")
    words = [(one, 0, 5), (one, 5, 9), (other, 2, 4), (one, 9, 20), (one, 30, 40)]
    runs = list(_runs([Spoken("low", cut, first, end, True) for cut, first, end in words]))
    assert runs == [("u0", 0, 9), ("u1", 2, 4), ("u0", 9, 20), ("u0", 30, 40)]


def test_a_share_of_one_changes_nearly_all_words(spoken):
    cuts = spoken(*(" ".join(order) for order in permutations(PITCH)))
    changed, total = 0, 0
    for seed in range(20):
        for cut, text, _ in splice(cuts, 1.0, random.Random(seed)):
            changed += sum(a != b for a, b in zip(text.split(), cut.supervisions[0].text.split(), strict=True))
            total += 3
    assert 0.5 < changed / total < 0.8  # each of the three words is drawn with about the same probability


def test_speakers_keep_to_their_own_words(spoken):
    cuts = spoken("low low", "high high", "low middle", speakers="aba")
    for seed in range(5):
        texts = {cut.id: text for cut, text, _ in splice(cuts, 1.0, random.Random(seed))}
        assert texts["u1"] == "high high"
        assert "high" not in texts["u0"] + texts["u2"]


def test_words_that_follow_each_other_elsewhere_are_likelier(spoken):
    cuts = spoken(*["low high"] * 10, "middle middle")
    rng = random.Random(0)
    spliced = [text for _ in range(10) for cut, text, _ in splice(cuts, 1.0, rng) if cut.id != "u10"]
    assert sum(text == "low high" for text in spliced) > 0.8 * len(spliced)


def test_a_word_stands_apart_where_it_is_quiet_on_both_sides(tone):
    samples = np.concatenate([np.zeros(3200), tone(0.3), tone(0.3), np.zeros(3200)])
    before, between, after = 1600, 3200 + 4800, len(samples) - 1600
    assert _is_apart(samples, before, after)
    assert not _is_apart(samples, before, between) and not _is_apart(samples, between, after)


@pytest.mark.parametrize(("below", "apart"), [(APART - 1, False), (APART + 1, True)])
def test_a_word_stands_apart_where_both_edges_are_so_many_decibels_below_it(tone, below, apart):
    word = tone(0.3)
    noise = word[:1600] * 10 ** (-below / 20)
    samples = np.concatenate([noise, word, noise])
    assert _is_apart(samples, 1600 - WINDOW // 2, 1600 + len(word) + WINDOW // 2) == apart


def test_a_click_is_no_word_that_stands_apart():
    samples = np.zeros(4000)
    samples[2000:2200] = 0.1
    assert _is_apart(samples, 1780, 1780 + 2 * WINDOW) and not _is_apart(samples, 1780, 1779 + 2 * WINDOW)


def test_words_that_run_into_each_other_stay_where_they_are(spoken):
    cuts = spoken("low middle high", gap=0.0)
    for seed in range(5):
        [(_, text, _)] = splice(cuts, 1.0, random.Random(seed))
        assert text == "low middle high"


def test_without_a_speaker_there_is_no_voice(spoken, caplog):
    cuts = spoken("low high", "middle low")
    cuts[0].supervisions[0].speaker = None
    assert [cut.id for cut, *_ in splice(cuts, 0.5, random.Random(0))] == ["u1"]
    assert "left out u0: its speaker is not known" in caplog.text
    cuts[1].supervisions[0].speaker = None
    with pytest.raises(ValueError, match="no utterance is left"):
        next(splice(cuts, 0.5, random.Random(0)))


def test_what_cannot_be_read_is_left_out(spoken, tmp_path, caplog):
    cuts = spoken("low high", "middle low")
    (tmp_path / "u0.wav").write_bytes(b"")
    assert [cut.id for cut, *_ in splice(cuts, 0.5, random.Random(0))] == ["u1"]
    assert "u0" in caplog.text


def test_joined_sounds_fade_into_each_other():
    ones, twos = np.ones(1000, np.float32), np.full(1000, 2.0, np.float32)
    joined = join([ones, twos, np.zeros(3, np.float32)])  # too short to fade: left out
    assert len(joined) == 2000 - FADE
    np.testing.assert_array_equal(joined[: 1000 - FADE], 1)
    np.testing.assert_array_equal(joined[1000:], 2)
    assert (np.diff(joined) >= 0).all() and np.abs(np.diff(joined)).max() < 0.02
    assert len(join([])) == 0


def test_the_quietest_place_is_within_the_bounds(tone):
    samples = tone(1.0)
    samples[7000:7400] = 0
    assert quietest(samples, 2000, 14000) == pytest.approx(7200, abs=80)
    assert 8000 <= quietest(samples, 8000, 14000) <= 14000
    assert quietest(samples, 15990, 20000) == pytest.approx(15995, abs=5)


def test_on_the_command_line(tmp_path, spoken, monkeypatch, capsys, caplog):
    spoken("low high", "middle low", "high").to_file(tmp_path / "aligned.jsonl.gz")
    (tmp_path / "u2.wav").unlink()
    arguments = ["splice", "aligned.jsonl.gz", "--wav", "spliced", "--copies", "3", "--out", "spliced.jsonl.gz"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["asr.corpus", *arguments])
    main()
    assert "6 utterances" in capsys.readouterr().out
    assert caplog.text.count("left out u2") == caplog.text.count("1 of 3 utterances left out") == 1
    cuts = open_corpus("spliced.jsonl.gz")
    assert {cut.id for cut in cuts} == {f"u{i}-spliced1-{copy}" for i in range(2) for copy in (1, 2, 3)}
    for cut in cuts:
        assert cut.supervisions[0].speaker == "a"
        assert heard(read_audio(cut.recording.sources[0].source)) == cut.supervisions[0].text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--share", "0"], "not 0.0 and 1"),
        (["--share", "1.5"], "not 1.5 and 1"),
        (["--copies", "0"], "not 0.5 and 0"),
        ([], "u0: the times of its words are unknown"),
        (["--wav", "."], "--wav . is there already"),
    ],
)
def test_what_cannot_be_spliced_is_one_line(tmp_path, spoken, monkeypatch, capsys, options, message):
    cuts = spoken("low high")
    for cut in cuts:
        cut.supervisions[0].alignment = None
    cuts.to_file(tmp_path / "plain.jsonl.gz")
    arguments = ["splice", "plain.jsonl.gz", "--wav", "spliced", "--out", "spliced.jsonl.gz", *options]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["asr.corpus", *arguments])
    with pytest.raises(SystemExit, match="2"):
        main()
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_copies_of_two_utterances_are_not_written_to_one_file(tmp_path, spoken, monkeypatch, capsys):
    cuts = spoken("low high", "middle low")
    CutSet.from_cuts(cut.with_id(name) for cut, name in zip(cuts, ("../a", "a"), strict=True)).to_file(
        tmp_path / "aligned.jsonl.gz"
    )
    arguments = ["splice", "aligned.jsonl.gz", "--wav", "spliced", "--out", "spliced.jsonl.gz"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["asr.corpus", *arguments])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "the copies of two utterances would be called like" in capsys.readouterr().err
