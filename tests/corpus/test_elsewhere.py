"""Cuts that Lhotse's users made elsewhere."""

import numpy as np
import pytest
import soundfile
from lhotse import CutSet, MonoCut, Recording, SupervisionSegment
from lhotse.qa import validate

from asr.audio.reading import SAMPLE_RATE
from asr.corpus import input_kind, iterate, open_corpus, read_cut
from asr.corpus.shards import write_shards
from tests.corpus.test_corpora import manifest, write


def test_cuts_made_elsewhere_must_be_single_utterances(tmp_path, tone):
    write(tmp_path / "a.wav", tone(1.0))
    (tmp_path / "m.jsonl").write_text(manifest([{"id": "a", "audio_filepath": "a.wav", "text": "one"}]))
    cut = open_corpus(tmp_path / "m.jsonl")[0]
    for supervisions in (2 * cut.supervisions, []):
        cut.supervisions = supervisions
        CutSet.from_cuts([cut]).to_file(tmp_path / "cuts.jsonl.gz")
        with pytest.raises(ValueError, match="a is not one channel with one supervision"):
            open_corpus(tmp_path / "cuts.jsonl.gz")
    (untranscribed,) = open_corpus(tmp_path / "cuts.jsonl.gz", transcribed=False)
    assert untranscribed.supervisions[0].text == "" and len(read_cut(untranscribed)) == SAMPLE_RATE


@pytest.mark.parametrize("make", ["perturb_speed", "several_files", "no_sound"])
def test_cuts_made_elsewhere_must_be_what_their_file_holds(tmp_path, tone, make):
    write(tmp_path / "a.wav", tone(1.0))
    (tmp_path / "m.jsonl").write_text(manifest([{"id": "a", "audio_filepath": "a.wav", "text": "one"}]))
    cut = open_corpus(tmp_path / "m.jsonl")[0]
    if make == "perturb_speed":
        cut = cut.perturb_speed(0.9)
    elif make == "several_files":
        cut.recording.sources *= 2
    else:
        cut.recording = None
    CutSet.from_cuts([cut]).to_file(tmp_path / "cuts.jsonl.gz")
    with pytest.raises(ValueError, match="is more than a part of a file"):
        open_corpus(tmp_path / "cuts.jsonl.gz")


def test_a_cut_made_elsewhere_is_of_its_own_channel(tmp_path, tone):
    """As in a telephone call with one speaker per channel."""
    sides = tone(1.0, 440), tone(1.0, 880)
    soundfile.write(tmp_path / "call.wav", np.stack(sides, axis=1), 16_000, subtype="FLOAT")
    recording = Recording.from_file(tmp_path / "call.wav")
    said = [SupervisionSegment(f"c{i}", recording.id, 0, 1.0, channel=i, text="one") for i in (0, 1)]
    cuts = CutSet.from_cuts(MonoCut(f"c{i}", 0, 1.0, i, [said[i]], recording=recording) for i in (0, 1))
    cuts.to_file(tmp_path / "cuts.jsonl.gz")
    heard = {cut.id: samples for cut, samples in iterate(open_corpus(tmp_path / "cuts.jsonl.gz"))}
    for i in (0, 1):
        np.testing.assert_allclose(heard[f"c{i}"], sides[i], atol=1e-6)
    copied = write_shards(open_corpus(tmp_path / "cuts.jsonl.gz"), tmp_path / "shards", 2)
    assert [(cut.channel, cut.supervisions[0].channel) for cut in copied] == [(0, 0)] * 2  # the only channel of a copy


def test_a_cut_made_elsewhere_of_no_channel_of_its_file_is_left_out(tmp_path, tone, caplog):
    soundfile.write(tmp_path / "call.wav", np.stack([tone(1.0)] * 2, axis=1), 16_000)
    recording = Recording.from_file(tmp_path / "call.wav")
    said = SupervisionSegment("c", recording.id, 0, 1.0, text="one")
    cuts = CutSet.from_cuts(MonoCut(f"c{i}", 0, 1.0, i, [said], recording=recording) for i in (1, 2))
    assert [cut.id for cut, _ in iterate(cuts)] == ["c1"]
    assert "left out c2: " in caplog.text and "call.wav: it has no channel 2" in caplog.text


def test_cuts_made_elsewhere_may_be_of_another_rate(tmp_path, tone):
    write(tmp_path / "a.wav", tone(1.0))
    (tmp_path / "m.jsonl").write_text(manifest([{"id": "a", "audio_filepath": "a.wav", "text": "one"}]))
    CutSet.from_cuts([open_corpus(tmp_path / "m.jsonl")[0].resample(8000)]).to_file(tmp_path / "cuts.jsonl.gz")
    assert len(read_cut(open_corpus(tmp_path / "cuts.jsonl.gz")[0])) == SAMPLE_RATE


def test_cuts_in_a_plain_file_are_not_taken_for_lines_of_a_manifest(tmp_path, tone, caplog):
    write(tmp_path / "a.wav", tone(1.0))
    (tmp_path / "m.jsonl").write_text(manifest([{"id": "a", "audio_filepath": "a.wav", "text": "one"}]))
    open_corpus(tmp_path / "m.jsonl").to_file(tmp_path / "cuts.jsonl")
    with pytest.raises(ValueError, match="no utterance that can be read"):
        open_corpus(tmp_path / "cuts.jsonl")
    assert "left out line 1: a cut of Lhotse's, which is read from .jsonl.gz only" in caplog.text


def test_what_cuts_say_beside_their_sound_is_no_input(tmp_path, tone):
    write(tmp_path / "a.wav", tone(1.0))
    (tmp_path / "m.jsonl").write_text(manifest([{"id": "a", "audio_filepath": "a.wav", "text": "one"}]))
    cut = open_corpus(tmp_path / "m.jsonl")[0]
    cut.custom = {"source": "a talk", "matrix": 1}
    assert input_kind(cut) == "sound" and len(read_cut(cut)) == SAMPLE_RATE


def test_copies_are_whole_for_lhotse(tmp_path, tone):
    write(tmp_path / "a.wav", tone(1.0))
    recording = Recording.from_file(tmp_path / "a.wav", recording_id="tape")
    said = SupervisionSegment("n", "tape", 0, 1.0, text="one")
    CutSet.from_cuts([MonoCut("n", 0, 1.0, 0, [said], recording=recording)]).to_file(tmp_path / "cuts.jsonl.gz")
    for cut in write_shards(open_corpus(tmp_path / "cuts.jsonl.gz"), tmp_path / "shards", 2):
        validate(cut)
