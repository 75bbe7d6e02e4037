import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from asr.audio.reading import SAMPLE_RATE, AudioError, read_audio, read_duration, stream_audio


def set_size(path: Path, size: int) -> None:
    """Writes a number of bytes of samples into the header of a wav."""
    whole = path.read_bytes()
    place = whole.index(b"data") + 4
    path.write_bytes(whole[:place] + size.to_bytes(4, "little") + whole[place + 4 :])


def test_a_header_that_does_not_know_the_length(tmp_path, tone):
    """Encoders that write FLAC to a pipe leave such a header; FFmpeg reads the file."""
    soundfile.write(tmp_path / "a.flac", tone(1.5), SAMPLE_RATE)
    data = bytearray((tmp_path / "a.flac").read_bytes())
    data[21] &= 0xF0  # the 36 bits of STREAMINFO that count samples
    data[22:26] = bytes(4)
    (tmp_path / "a.flac").write_bytes(data)
    if importlib.util.find_spec("av"):
        assert read_duration(tmp_path / "a.flac") == 1.5
        return
    with pytest.raises(AudioError, match="does not say how long it is"):
        read_duration(tmp_path / "a.flac")


@pytest.mark.parametrize(
    ("suffix", "settings"),
    [
        ("mp3", {"format": "MP3"}),
        ("ogg", {"format": "OGG", "subtype": "VORBIS"}),
        ("opus", {"format": "OGG", "subtype": "OPUS"}),
    ],
)
def test_files_that_were_joined_are_heard_to_their_end(tmp_path, settings, suffix):
    """libsndfile stops at the end of the first file."""
    once, twice = tmp_path / f"once.{suffix}", tmp_path / f"twice.{suffix}"
    soundfile.write(once, np.random.default_rng(0).normal(0, 0.1, 3 * SAMPLE_RATE), SAMPLE_RATE, **settings)
    twice.write_bytes(2 * once.read_bytes())
    assert read_duration(once) == pytest.approx(3.0, abs=0.1)
    if importlib.util.find_spec("av"):
        assert read_duration(twice) == pytest.approx(6.0, abs=0.2)
        assert len(read_audio(twice)) == pytest.approx(6 * SAMPLE_RATE, abs=3200)
        return
    with pytest.raises(AudioError, match="there is more in it than its header says"):
        read_audio(twice)


@pytest.mark.parametrize("quiet", [0, 5])
def test_an_mp3_without_a_table_is_as_long_as_its_frames(tmp_path, quiet, monkeypatch):
    """At a variable bit rate, a file that starts with silence seems too long, and one that does not seems too short."""
    sound = np.concatenate([np.zeros(quiet * SAMPLE_RATE), np.random.default_rng(0).normal(0, 0.1, 5 * SAMPLE_RATE)])
    path = tmp_path / "a.mp3"
    soundfile.write(path, sound, SAMPLE_RATE, format="MP3", bitrate_mode="VARIABLE", compression_level=0.5)
    data = path.read_bytes()
    path.write_bytes(data[data.index(data[:2], 100) :])  # the first frame holds the table
    pytest.importorskip("av")
    monkeypatch.setattr("asr.audio.reading.io.BytesIO", lambda *args: pytest.fail("all of it is in memory"))
    assert read_duration(path) == pytest.approx(len(sound) / SAMPLE_RATE, abs=0.15)
    assert len(read_audio(path)) == pytest.approx(len(sound), abs=2400)


@pytest.mark.parametrize("tag", [b"TAG" + bytes(125), b"APETAGEX" + bytes(30_000)], ids=["ID3v1", "APE"])
def test_a_tag_at_the_end_of_an_mp3_is_no_sound(tmp_path, tag):
    path = tmp_path / "a.mp3"
    soundfile.write(path, np.random.default_rng(0).normal(0, 0.1, 3 * SAMPLE_RATE), SAMPLE_RATE, format="MP3")
    before = read_audio(path)
    path.write_bytes(path.read_bytes() + tag)
    assert np.array_equal(read_audio(path), before) and read_duration(path) == len(before) / SAMPLE_RATE


def test_a_wav_that_was_copied_in_part_is_named(tmp_path, tone):
    soundfile.write(tmp_path / "a.wav", tone(2.0), SAMPLE_RATE)
    whole = (tmp_path / "a.wav").read_bytes()
    (tmp_path / "a.wav").write_bytes(whole[: len(whole) // 2])
    for read in (read_audio, read_duration):
        with pytest.raises(AudioError, match=r"a.wav: cut off, the last 1.0 s are missing"):
            read(tmp_path / "a.wav")
    (tmp_path / "a.wav").write_bytes(whole[:-100])  # a few milliseconds
    assert len(read_audio(tmp_path / "a.wav")) == 2 * SAMPLE_RATE - 50


def test_a_chunk_of_odd_size_before_the_samples_has_a_byte_of_padding(tmp_path, tone):
    soundfile.write(tmp_path / "a.wav", tone(2.0), SAMPLE_RATE, subtype="PCM_16")
    whole = (tmp_path / "a.wav").read_bytes()
    place = whole.index(b"data")
    note = b"note" + (3).to_bytes(4, "little") + b"abc\0"
    (tmp_path / "a.wav").write_bytes(whole[:place] + note + whole[place:-SAMPLE_RATE])
    with pytest.raises(AudioError, match=r"a.wav: cut off, the last 0.5 s are missing"):
        read_duration(tmp_path / "a.wav")


def test_an_mp3_that_was_copied_in_part_is_named(tmp_path, tone):
    soundfile.write(tmp_path / "a.mp3", tone(4.0), SAMPLE_RATE, format="MP3")
    whole = (tmp_path / "a.mp3").read_bytes()
    (tmp_path / "a.mp3").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(AudioError, match=r"a.mp3: cut off, the last [12]\.\d s are missing"):
        read_audio(tmp_path / "a.mp3")


@pytest.mark.parametrize("form", ["NIST", "AIFF", "AU", "RF64", "W64", "W64 IMA_ADPCM"])
@pytest.mark.parametrize("channels", [1, 2])
def test_a_copy_in_part_is_named_where_the_header_says_how_long_it_was(tmp_path, tone, form, channels):
    form, _, subtype = form.partition(" ")
    sound = np.stack([tone(10.0)] * channels, axis=1)
    soundfile.write(tmp_path / "a", sound, SAMPLE_RATE, subtype or "PCM_16", format=form)
    whole = (tmp_path / "a").read_bytes()
    assert read_duration(tmp_path / "a") == (pytest.approx(10, abs=0.1) if subtype else 10)
    (tmp_path / "a").write_bytes(whole[: len(whole) // 2])
    for read in (read_audio, read_duration):
        with pytest.raises(AudioError, match=r"a: cut off, the last (4\.9|5\.0|5\.1) s are missing"):
            read(tmp_path / "a")


@pytest.mark.parametrize(
    ("form", "place", "size"), [("AIFF", 4, 0x7F00002E), ("AIFF", 4, 2**32 - 1), ("AU", 8, 2**32 - 1)]
)
def test_a_size_that_was_written_to_a_pipe_is_no_promise(tmp_path, tone, form, place, size):
    soundfile.write(tmp_path / "a", tone(2.0), SAMPLE_RATE, "PCM_16", format=form)
    whole = (tmp_path / "a").read_bytes()
    (tmp_path / "a").write_bytes(whole[:place] + size.to_bytes(4, "big") + whole[place + 4 :])
    assert read_duration(tmp_path / "a") == len(read_audio(tmp_path / "a")) / SAMPLE_RATE == 2.0


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_an_ogg_file_that_ends_within_a_page_is_named(tmp_path, subtype):
    sound = np.random.default_rng(0).normal(0, 0.1, 20 * SAMPLE_RATE)
    soundfile.write(tmp_path / "a.ogg", sound, SAMPLE_RATE, subtype, format="OGG")
    assert read_duration(tmp_path / "a.ogg") == pytest.approx(20, abs=0.1)
    whole = (tmp_path / "a.ogg").read_bytes()
    for size in (len(whole) // 2, whole.rfind(b"OggS") + 20):
        (tmp_path / "a.ogg").write_bytes(whole[:size])
        for read in (read_audio, read_duration):
            with pytest.raises(AudioError, match=r"a\.ogg: cut off within its last page"):
                read(tmp_path / "a.ogg")


def test_a_part_of_a_flac_that_was_copied_in_part_is_named(tmp_path):
    soundfile.write(tmp_path / "a.flac", np.random.default_rng(0).normal(0, 0.1, 40 * SAMPLE_RATE), SAMPLE_RATE)
    whole = (tmp_path / "a.flac").read_bytes()
    (tmp_path / "a.flac").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(AudioError, match=r"a\.flac: damaged before 24 s"):
        read_audio(tmp_path / "a.flac", start=25, end=28)


@pytest.mark.parametrize("size", [0, 8000, 0x7FFFFFFF, 0xFFFFFFFF])
def test_a_wav_whose_writer_did_not_come_back_to_its_header_is_heard_to_its_end(tmp_path, tone, size):
    """The writer was killed, or wrote to a pipe."""
    soundfile.write(tmp_path / "a.wav", tone(2.0), SAMPLE_RATE, subtype="PCM_16")
    set_size(tmp_path / "a.wav", size)
    assert read_duration(tmp_path / "a.wav") == pytest.approx(2.0, abs=0.01)
    heard = read_audio(tmp_path / "a.wav")
    np.testing.assert_allclose(heard[: 2 * SAMPLE_RATE], tone(2.0)[: len(heard)], atol=1e-3)


TAG = b"id3 " + (4000).to_bytes(4, "little") + bytes(4000)


@pytest.mark.parametrize("after", [TAG, bytes(40_000)], ids=["a chunk", "the zeros that fill a sector"])
def test_what_comes_after_the_samples_of_a_wav_is_no_sound(tmp_path, tone, after):
    soundfile.write(tmp_path / "a.wav", tone(1.0), SAMPLE_RATE, subtype="PCM_16")
    (tmp_path / "a.wav").write_bytes((tmp_path / "a.wav").read_bytes() + after)
    assert read_duration(tmp_path / "a.wav") == 1.0
    assert len(read_audio(tmp_path / "a.wav")) == SAMPLE_RATE


def test_a_chunk_at_an_odd_place_is_no_sound(tmp_path, tone):
    soundfile.write(tmp_path / "a.wav", tone(1.0)[:-1], SAMPLE_RATE, subtype="PCM_24")
    whole = (tmp_path / "a.wav").read_bytes()
    place = whole.index(b"data") + 4
    end = place + 4 + int.from_bytes(whole[place : place + 4], "little")
    assert end % 2
    (tmp_path / "a.wav").write_bytes(whole[:end] + TAG)  # without the padding byte that should be between
    assert read_duration(tmp_path / "a.wav") == (SAMPLE_RATE - 1) / SAMPLE_RATE


def test_what_a_header_does_not_count_is_left_out_at_the_end_where_ffmpeg_is_missing(tmp_path, tone, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    soundfile.write(tmp_path / "a.wav", tone(2.0), SAMPLE_RATE, subtype="PCM_16")
    set_size(tmp_path / "a.wav", 2 * SAMPLE_RATE)
    heard = 0
    with pytest.raises(AudioError, match=r"more in it than its header says. FFmpeg may read it: pip install '.\[av\]'"):
        for block in stream_audio(tmp_path / "a.wav"):
            heard += len(block)
    assert heard == SAMPLE_RATE


def test_what_is_damaged_after_the_end_by_the_header_is_heard_once_up_to_there(tmp_path, tone):
    pytest.importorskip("av")
    damaged = np.where(np.arange(40 * SAMPLE_RATE) == 35 * SAMPLE_RATE, 1e30, tone(40.0))
    soundfile.write(tmp_path / "a.wav", damaged, SAMPLE_RATE, subtype="FLOAT")
    set_size(tmp_path / "a.wav", 4 * 20 * SAMPLE_RATE)
    heard = 0
    with pytest.raises(AudioError, match=r"damaged \(a sample of 1e\+30\)"):
        for block in stream_audio(tmp_path / "a.wav"):
            heard += len(block)
    assert 34 < heard / SAMPLE_RATE <= 35


def test_a_header_of_no_rate_is_named(tmp_path, tone):
    soundfile.write(tmp_path / "a.wav", tone(), 5)
    with pytest.raises(AudioError, match="5 samples per second"):
        read_audio(tmp_path / "a.wav")


@pytest.mark.parametrize("read", [read_audio, read_duration])
def test_a_header_of_a_damaged_rate_is_named_before_a_filter_is_made_for_it(tmp_path, tone, read):
    soundfile.write(tmp_path / "a.wav", tone(), SAMPLE_RATE)
    header = bytearray((tmp_path / "a.wav").read_bytes())
    header[27] = 0x59
    (tmp_path / "a.wav").write_bytes(header)
    with pytest.raises(AudioError, match="1493188224 samples per second"):
        read(tmp_path / "a.wav")
