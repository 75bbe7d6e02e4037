import json
from itertools import pairwise

import pytest

from asr.decode.transcript import Segment, Transcript, Word
from asr.formats import CUE_LETTERS, CUE_PAUSE, CUE_SECONDS, FORMATS, LINGER, Cue, ctm_line, cues


def said(text: str, start: float = 0.0, pace: float = 0.5, end: float | None = None) -> Segment:
    """A segment whose words start `pace` seconds apart and last four fifths of that."""
    words = [Word(word, 0.9, start + pace * i, start + pace * i + 0.8 * pace) for i, word in enumerate(text.split())]
    end = words[-1].end if end is None else end
    return Segment(start, end, text, -1.0, [(text, -1.0)], words)


TALK = Transcript(
    "talks/one.wav", "good morning all of you", 10.0, [said("good morning", 1.0), said("all of you", 3.5)]
)


def test_srt():
    assert FORMATS["srt"](TALK) == (
        "1\n00:00:01,000 --> 00:00:02,200\ngood morning\n\n2\n00:00:03,500 --> 00:00:04,900\nall of you\n"
    )


def test_vtt():
    assert FORMATS["vtt"](TALK) == (
        "WEBVTT\n\n00:00:01.000 --> 00:00:02.200\ngood morning\n\n00:00:03.500 --> 00:00:04.900\nall of you\n"
    )


def test_ctm():
    lines = FORMATS["ctm"](TALK).splitlines()
    assert lines[0] == "one 1 1.00 0.40 good 0.9000" and lines[-1] == "one 1 4.50 0.40 you 0.9000" and len(lines) == 5


def test_no_word_of_ctm_ends_after_the_next_begins():
    ends = [0.114, 0.226, 0.334, 0.446, 0.554]
    lines = [ctm_line("a", *times, "b").split() for times in pairwise(ends)]
    for before, after in pairwise(lines):
        assert round(float(before[2]) + float(before[3]), 2) == float(after[2])


def test_ctms_columns_stay_apart_and_no_word_is_lost():
    words = [Word(word, 0.5) for word in ("one", "two")]
    untimed = Transcript("my talk.wav", "one two", 4.0, [Segment(1.0, 3.0, "one two", -1.0, [], words)])
    assert FORMATS["ctm"](untimed) == "my_talk 1 1.00 1.00 one 0.5000\nmy_talk 1 2.00 1.00 two 0.5000\n"


def test_a_recording_without_a_name_has_its_column_in_ctm():
    assert ctm_line("  ", 0.0, 0.5, "a").split() == ["_", "1", "0.00", "0.50", "a"]


def test_vtt_is_escaped():
    assert "\nAT&amp;T &lt;3\n" in FORMATS["vtt"](Transcript("a", "", 5.0, [said("AT&T <3")]))


def test_json_has_the_times_of_words_where_there_are_any():
    word = json.loads(FORMATS["json"](TALK))["segments"][1]["words"][0]
    assert word == {"word": "all", "confidence": 0.9, "start": 3.5, "end": 3.9}
    untimed = Transcript("a", "all", 1.0, [Segment(0.0, 1.0, "all", -1.0, [], [Word("all", 0.9)])])
    assert json.loads(FORMATS["json"](untimed))["segments"][0]["words"] == [{"word": "all", "confidence": 0.9}]


def test_json_has_the_mean_confidence_of_the_words_where_there_are_any():
    words = [Word("so", 0.9), Word("it", 0.3), Word("is", 0.6)]
    heard = [Segment(0.0, 1.0, "so it", -1.0, [], words[:2]), Segment(1.0, 2.0, "is", -1.0, [], words[2:])]
    known = json.loads(FORMATS["json"](Transcript("a", "so it is", 2.0, heard)))
    assert [known["confidence"], *(segment["confidence"] for segment in known["segments"])] == [0.6, 0.6, 0.6]
    assert heard[0].confidence == pytest.approx(0.6)
    assert json.loads(FORMATS["json"](Transcript("silence", "", 2.0)))["confidence"] is None


def test_a_clock_goes_beyond_hours():
    late = Transcript("a", "late", 400_000.0, [said("late", 359_999.9995)])
    assert "100:00:00,000 --> 100:00:00,400" in FORMATS["srt"](late)


@pytest.mark.parametrize(("form", "empty"), [("srt", ""), ("vtt", "WEBVTT\n"), ("ctm", ""), ("text", "\n")])
def test_silence_has_no_subtitles(form, empty):
    assert FORMATS[form](Transcript("a", "", 5.0, [Segment(0.0, 5.0, "", 0.0)])) == empty


def test_a_pause_ends_a_subtitle():
    slow = said("one two three", pace=5.1 * CUE_PAUSE)  # a fifth of the pace is silence
    assert [cue.text for cue in cues([slow])] == ["one", "two", "three"]
    quick = said("one two three", pace=4.9 * CUE_PAUSE)
    assert [cue.text for cue in cues([quick])] == ["one two", "three"]  # the third would make it too long


def test_subtitles_are_neither_long_nor_late():
    segment = said(" ".join(f"word{i}" for i in range(100)), pace=0.3)
    found = cues([segment])
    assert " ".join(cue.text for cue in found) == segment.text
    for cue, after in zip(found, [*found[1:], None], strict=True):
        assert len(cue.text) <= CUE_LETTERS and cue.end - cue.start <= CUE_SECONDS + LINGER
        assert after is None or cue.end <= after.start


@pytest.mark.parametrize("words", [22, 25, 33])
def test_no_word_is_left_over_for_a_subtitle_of_its_own(words):
    """21 words fit into one."""
    found = cues([said(" ".join(["abc"] * words), pace=0.3)])
    lengths = [len(cue.text) for cue in found]
    assert len(found) == 2 and sum(lengths) + 1 == 4 * words - 1
    assert min(lengths) > 0.6 * max(lengths)


def test_subtitles_of_a_script_without_spaces_are_cut_between_its_letters():
    text = "天気がいい" * 40
    words = [Word(letter, 0.9, 0.1 * i, 0.1 * i + 0.1) for i, letter in enumerate(text)]
    found = cues([Segment(0.0, 20.0, text, -1.0, [], words)])
    assert "".join(cue.text for cue in found) == text and len(found) == 3


def test_a_subtitle_stays_for_a_moment():
    one, two = cues([said("one", 0.0, end=5.0), said("two", 3.0, end=3.5)])
    assert one == Cue(0.0, 0.4 + LINGER, "one")
    assert two == Cue(3.0, 3.5, "two")  # no longer than the audio


def test_a_word_that_is_too_long_is_a_subtitle_of_its_own():
    long = "x" * (CUE_LETTERS + 1)
    assert [cue.text for cue in cues([said(f"a {long} b")])] == ["a", long, "b"]


def test_without_times_a_segment_is_a_subtitle():
    untimed = Segment(2.0, 4.0, "all of it", -1.0, [], [Word(word, 0.9) for word in ("all", "of", "it")])
    assert cues([said("one", 0.0), untimed]) == [Cue(0.0, 0.4 + LINGER, "one"), Cue(2.0, 4.0, "all of it")]


def test_a_text_without_words_is_a_subtitle():
    assert cues([Segment(2.0, 4.0, "♪", -1.0)]) == [Cue(2.0, 4.0, "♪")]
