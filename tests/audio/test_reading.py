import codecs
import io
import math
import os
import sys

import numpy as np
import pytest
import soundfile
import torch

from asr.audio._torchaudio import functional
from asr.audio.matrices import read_matrix, read_shape
from asr.audio.reading import (
    SAMPLE_RATE,
    AudioError,
    files_under,
    printable,
    read_audio,
    read_duration,
    stream_audio,
    write_wav,
)
from asr.resources import resource


@pytest.mark.parametrize(
    ("suffix", "subtype", "tolerance"),
    [("wav", "PCM_16", 1e-4), ("flac", "PCM_24", 1e-5), ("ogg", "VORBIS", 0.05), ("mp3", "MPEG_LAYER_III", 0.05)],
)
def test_every_format_gives_the_same_samples(tmp_path, tone, suffix, subtype, tolerance):
    path = tmp_path / f"a.{suffix}"
    soundfile.write(path, tone(1.0), SAMPLE_RATE, subtype=subtype)
    samples = read_audio(path)
    assert samples.dtype == np.float32
    assert abs(len(samples) - SAMPLE_RATE) <= 1200  # mp3 pads
    if suffix != "mp3":
        assert np.abs(samples[200:-200] - tone(1.0)[200:-200]).max() < tolerance


def test_an_mp3_that_is_read_block_by_block_is_whole_and_prints_nothing(tmp_path, monkeypatch, capfd):
    soundfile.write(tmp_path / "a.mp3", read_audio(resource("data", "samples", "corner.flac")), SAMPLE_RATE)
    whole, _ = soundfile.read(tmp_path / "a.mp3", dtype="float32")
    monkeypatch.setattr("asr.audio.reading._BLOCK_SECONDS", 1)
    assert np.allclose(read_audio(tmp_path / "a.mp3"), whole, atol=1e-6)
    assert capfd.readouterr() == ("", "")  # what libraries in C print, too


def test_opus_is_read(tmp_path, tone):
    soundfile.write(tmp_path / "a.opus", tone(1.0), SAMPLE_RATE, format="OGG", subtype="OPUS")
    assert read_audio(tmp_path / "a.opus").std() == pytest.approx(tone(1.0).std(), rel=0.05)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000])
def test_any_rate_becomes_16_khz(tmp_path, rate):
    t = np.arange(2 * rate) / rate
    soundfile.write(tmp_path / "a.wav", np.sin(2 * np.pi * 440 * t) * 0.3, rate, subtype="FLOAT")
    samples = read_audio(tmp_path / "a.wav")
    expected = 0.3 * np.sin(2 * np.pi * 440 * np.arange(len(samples)) / SAMPLE_RATE)
    assert len(samples) == 2 * SAMPLE_RATE
    assert np.abs(samples - expected)[500:-500].max() < 2e-3


@pytest.mark.parametrize("rate", [8000, 16000, 44100])
def test_a_file_without_a_sample_is_no_sound_at_any_rate(tmp_path, rate):
    """A recorder that was stopped before it wrote the length leaves such a file."""
    soundfile.write(tmp_path / "a.wav", np.zeros(0), rate)
    assert read_audio(tmp_path / "a.wav").shape == (0,)
    assert read_duration(tmp_path / "a.wav") == 0


@pytest.mark.parametrize("rate", [16001, 22254])
def test_a_rate_without_a_common_divisor_takes_no_longer(tmp_path, rate):
    """Exact resampling would need as many filters as samples: 4.8 GB for 16,001 Hz."""
    t = np.arange(rate) / rate
    soundfile.write(tmp_path / "a.wav", 0.5 * np.sin(2 * np.pi * 440 * t), rate)
    sound = read_audio(tmp_path / "a.wav")
    assert len(sound) == pytest.approx(SAMPLE_RATE, abs=2)
    spectrum = np.abs(np.fft.rfft(sound[:15000], 160000))
    assert spectrum.argmax() / 10 == pytest.approx(440, abs=0.5)


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100])
@pytest.mark.parametrize(
    ("suffix", "subtype"), [("wav", "PCM_16"), ("wav", "GSM610"), ("flac", "PCM_16"), ("mp3", None)]
)
def test_a_part_is_that_part_of_the_whole(tmp_path, rate, suffix, subtype):
    path = tmp_path / f"a.{suffix}"
    soundfile.write(path, np.random.default_rng(0).normal(0, 0.1, 70 * rate), rate, subtype=subtype)
    whole = read_audio(path)
    for start, end in ((0.0, 1.5), (0.3, 2.0), (33.333, 40.0), (69.0, 75.0), (80.0, 81.0)):
        first, last = round(start * SAMPLE_RATE), round(end * SAMPLE_RATE)
        part = read_audio(path, start=start, end=end)
        assert len(part) == len(whole[first:last])
        np.testing.assert_allclose(part, whole[first:last], atol=1e-5)


def without_its_size(path) -> None:
    """Leaves a WAV file as it is when written to a pipe; FFmpeg reads it."""
    pytest.importorskip("av")
    whole = path.read_bytes()
    place = whole.index(b"data") + 4
    path.write_bytes(whole[:place] + bytes(4) + whole[place + 4 :])


@pytest.mark.parametrize("damage", [lambda path: None, without_its_size])
def test_what_is_no_number_is_silence_or_full_scale(tmp_path, damage):
    samples = np.array([0.1, np.nan, np.inf, -np.inf, -0.1] * 4000, np.float32)
    soundfile.write(tmp_path / "a.wav", samples, SAMPLE_RATE, subtype="FLOAT")
    damage(tmp_path / "a.wav")
    np.testing.assert_allclose(read_audio(tmp_path / "a.wav"), [0.1, 0.0, 1.0, -1.0, -0.1] * 4000, atol=1e-6)


def test_channels_are_averaged(tmp_path, tone):
    soundfile.write(tmp_path / "a.wav", np.stack([tone(), 0 * tone()], axis=1), SAMPLE_RATE, subtype="FLOAT")
    assert np.abs(read_audio(tmp_path / "a.wav") - tone() / 2).max() < 1e-6


def test_a_file_that_is_damaged_within_is_read_up_to_there(tmp_path):
    soundfile.write(tmp_path / "a.flac", np.random.default_rng(0).normal(0, 0.1, 40 * SAMPLE_RATE), SAMPLE_RATE)
    data = bytearray((tmp_path / "a.flac").read_bytes())
    middle = int(0.6 * len(data))
    data[middle : middle + 20_000] = bytes(20_000)
    (tmp_path / "a.flac").write_bytes(data)
    blocks = []
    with pytest.raises(AudioError, match=r"damaged after 2\d\.\d s"):
        for block in stream_audio(tmp_path / "a.flac"):
            blocks.append(block)
    assert 22 < sum(map(len, blocks)) / SAMPLE_RATE < 25


def test_what_is_open_otherwise_than_for_reading_bytes_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("\u00e9")
    closed = open(tmp_path / "a.txt", "rb")  # noqa: SIM115
    closed.close()
    for file in (closed, io.StringIO("text"), open(tmp_path / "b", "wb")):  # noqa: SIM115
        with pytest.raises(AudioError, match="<file>: cannot be read as bytes"):
            read_audio(file, "<file>")


@pytest.mark.parametrize("form", ["wav", "m4a"])
def test_one_channel_can_be_asked_for(tmp_path, tone, form):
    sides = np.stack([tone(1.0, 440), tone(1.0, 880)], axis=1).astype(np.float32)
    path = tmp_path / f"a.{form}"
    if form == "wav":
        soundfile.write(path, sides, SAMPLE_RATE, subtype="FLOAT")
    else:
        av = pytest.importorskip("av")
        with av.open(str(path), "w") as container:
            stream = container.add_stream("aac", rate=SAMPLE_RATE, layout="stereo")
            frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(sides.T), format="fltp", layout="stereo")
            frame.sample_rate = SAMPLE_RATE
            container.mux([*stream.encode(frame), *stream.encode(None)])
    for channel in (0, 1):
        heard = read_audio(path, channel=channel)
        spectrum = np.abs(np.fft.rfft(heard[:SAMPLE_RATE]))
        assert round(float(np.argmax(spectrum)) * SAMPLE_RATE / len(heard[:SAMPLE_RATE])) == pytest.approx(
            (440, 880)[channel], abs=2
        )
    with pytest.raises(AudioError):
        read_audio(path, channel=2)


@pytest.mark.parametrize("rate", [8000, 44100])
def test_resampling_in_blocks_equals_resampling_in_one_piece(tmp_path, rate):
    noise = 0.1 * torch.randn(70 * rate)
    soundfile.write(tmp_path / "a.wav", noise.numpy(), rate, subtype="FLOAT")
    whole = functional.resample(noise, rate, SAMPLE_RATE).numpy()
    assert sum(1 for _ in stream_audio(tmp_path / "a.wav")) > 1
    assert np.abs(read_audio(tmp_path / "a.wav") - whole).max() < 1e-5


@pytest.mark.parametrize("rate", [8000, 48000])
def test_a_moment_of_sound_is_as_long_at_16_khz(tmp_path, rate):
    soundfile.write(tmp_path / "a.wav", 0.1 * np.ones(round(0.015 * rate)), rate)
    assert len(read_audio(tmp_path / "a.wav")) == round(0.015 * SAMPLE_RATE)


def test_a_pipe_is_a_file(tmp_path, tone):
    soundfile.write(tmp_path / "a.flac", tone(), SAMPLE_RATE)
    end, begin = os.pipe()
    os.write(begin, (tmp_path / "a.flac").read_bytes())
    os.close(begin)
    assert len(read_audio(f"/dev/fd/{end}")) == SAMPLE_RATE
    os.close(end)


def test_a_sound_comes_from_bytes_files_and_standard_input(tmp_path, tone, monkeypatch):
    soundfile.write(tmp_path / "a.flac", tone(), SAMPLE_RATE)
    data = (tmp_path / "a.flac").read_bytes()
    assert len(read_audio(data)) == SAMPLE_RATE
    assert len(read_audio(io.BytesIO(data))) == SAMPLE_RATE
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert len(read_audio("-")) == SAMPLE_RATE


def write_aac(path, samples: np.ndarray, rate: int = SAMPLE_RATE, **metadata: str) -> None:
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        container.metadata.update(metadata)
        stream = container.add_stream("aac", rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
        frame.sample_rate = rate
        for packet in (*stream.encode(frame), *stream.encode(None)):
            container.mux(packet)


def test_m4a_is_read_where_pyav_is_installed(tmp_path, tone):
    write_aac(tmp_path / "a.m4a", tone(2.0))
    samples = read_audio(tmp_path / "a.m4a")
    assert len(samples) == pytest.approx(2 * SAMPLE_RATE, abs=3000)
    assert read_duration(tmp_path / "a.m4a") == pytest.approx(2.0, abs=0.2)
    assert samples[4000:-4000].std() == pytest.approx(0.3 / math.sqrt(2), rel=0.05)


def test_a_title_in_another_encoding_is_no_obstacle(tmp_path, tone):
    write_aac(tmp_path / "a.m4a", tone(1.0), title="Cafe")
    (tmp_path / "a.m4a").write_bytes((tmp_path / "a.m4a").read_bytes().replace(b"Cafe", "Café".encode("latin-1")))
    assert len(read_audio(tmp_path / "a.m4a")) == pytest.approx(SAMPLE_RATE, abs=3000)


def test_the_rate_may_change_within_a_stream(tmp_path, tone):
    write_aac(tmp_path / "a.aac", tone(1.0))
    write_aac(tmp_path / "b.aac", tone(1.0)[::2].copy(), rate=SAMPLE_RATE // 2)
    (tmp_path / "both.aac").write_bytes((tmp_path / "a.aac").read_bytes() + (tmp_path / "b.aac").read_bytes())
    assert len(read_audio(tmp_path / "both.aac")) == pytest.approx(2 * SAMPLE_RATE, abs=6000)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("missing.wav", None, "no such file"),
        ("empty.wav", b"", "empty"),
        ("text.wav", b"hello " * 100, r"text\.wav: this is text"),
        ("text.wav", codecs.BOM_UTF8 + "\u4e00".encode() * 400, r"text\.wav: this is text"),
    ],
)
def test_what_is_no_sound_is_named(tmp_path, name, content, reason):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(AudioError, match=reason):
        read_audio(tmp_path / name)


def test_a_folder_is_no_sound(tmp_path):
    with pytest.raises(AudioError, match="directory"):
        read_audio(tmp_path)


def test_matrices_are_read_from_npy_and_pt(tmp_path):
    matrix = np.random.default_rng(0).random((7, 3)).astype(np.float32)
    np.save(tmp_path / "a.npy", matrix)
    torch.save(torch.from_numpy(matrix).requires_grad_(), tmp_path / "a.pt")
    for name in ("a.npy", "a.pt"):
        assert np.array_equal(read_matrix(tmp_path / name), matrix)
        assert read_shape(tmp_path / name) == (7, 3)
    torch.save(torch.from_numpy(matrix).bfloat16(), tmp_path / "a.pt")
    assert read_matrix(tmp_path / "a.pt").dtype == np.float32
    assert np.abs(read_matrix(tmp_path / "a.pt") - matrix).max() < 0.01


@pytest.mark.parametrize("name", ["a.npy", "a.pt"])
def test_a_complex_matrix_is_refused(tmp_path, name):
    matrix = np.ones((7, 3), np.complex64)
    np.save(tmp_path / "a.npy", matrix)
    torch.save(torch.from_numpy(matrix), tmp_path / "a.pt")
    with pytest.raises(AudioError, match=r"\(T, d\), of numbers, and not \(7, 3\), complex64"):
        read_matrix(tmp_path / name)


def test_bytes_are_not_quoted_in_errors():
    with pytest.raises(AudioError, match="^<bytes>: "):
        read_duration(bytes(range(256)) * 100)


@pytest.mark.parametrize("channel", [-1, -3, 2])
def test_channels_count_from_zero(tmp_path, channel):
    soundfile.write(tmp_path / "a.wav", np.zeros((SAMPLE_RATE, 2)), SAMPLE_RATE)
    with pytest.raises(AudioError, match=f"its channels are 0 to 1, not {channel}"):
        read_audio(tmp_path / "a.wav", channel=channel)


def test_a_pickle_is_never_loaded(tmp_path):
    np.save(tmp_path / "a.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    torch.save(pytest.raises, tmp_path / "a.pt")
    (tmp_path / "b.npy").write_bytes(b"nothing of the kind")
    for name in ("a.npy", "a.pt", "b.npy"):
        with pytest.raises(AudioError, match=r"not a feature matrix \(no array that"):  # nor advice to trust it
            read_matrix(tmp_path / name)
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(AudioError, match="not a feature matrix"):
            read_matrix(tmp_path / name)


@pytest.mark.parametrize(
    ("matrix", "reason"),
    [
        (np.zeros(5), r"\(T, d\)"),
        (np.zeros((0, 3)), "is empty"),
        (np.full((7, 3), np.nan), "not finite"),
        (np.full((7, 3), 1e300), "not finite"),
    ],
    ids=["vector", "empty", "NaN", "too large for float32"],
)
def test_what_is_no_matrix_of_numbers_is_named(tmp_path, matrix, reason):
    np.save(tmp_path / "a.npy", matrix)
    with pytest.raises(AudioError, match=rf"a\.npy: .*{reason}"):
        read_matrix(tmp_path / "a.npy")


@pytest.mark.parametrize("name", ["a.raw", "a.RAW", "a"])
def test_what_a_file_holds_counts_and_not_its_name(tmp_path, tone, name):
    soundfile.write(tmp_path / "a.wav", tone(), SAMPLE_RATE)
    (tmp_path / "a.wav").rename(tmp_path / name)
    assert len(read_audio(tmp_path / name)) == read_duration(tmp_path / name) * SAMPLE_RATE == SAMPLE_RATE


def test_bytes_that_are_called_raw_are_no_sound(tmp_path):
    (tmp_path / "a.raw").write_bytes(bytes(range(256)) * 20)
    for read in (read_audio, read_duration):
        with pytest.raises(AudioError, match=r"a\.raw"):
            read(tmp_path / "a.raw")


@pytest.mark.parametrize("damage", [lambda path: None, without_its_size])
def test_a_sample_that_cannot_be_is_damage(tmp_path, tone, damage):
    samples = tone()
    samples[9] = 1e30
    soundfile.write(tmp_path / "a.wav", samples, SAMPLE_RATE, subtype="FLOAT")
    damage(tmp_path / "a.wav")
    with pytest.raises(AudioError, match=r"a\.wav: damaged \(a sample of 1e\+30\)$"):
        read_audio(tmp_path / "a.wav")


def test_samples_beyond_the_full_scale_are_written_quieter_and_not_clipped(tmp_path, tone):
    """For example, floats on the scale of 16-bit integers."""
    write_wav(tmp_path / "a.wav", 30_000 * tone())
    assert np.abs(read_audio(tmp_path / "a.wav") - tone() / np.abs(tone()).max()).max() < 1e-4


def test_what_cannot_be_written_whole_is_named_and_leaves_no_file(tmp_path, tone, monkeypatch):
    def full(path, *_):
        path.write_bytes(b"RIFF")
        raise soundfile.LibsndfileError(2)

    monkeypatch.setattr("soundfile.write", full)
    with pytest.raises(OSError, match=r"a\.wav"):
        write_wav(tmp_path / "a.wav", tone())
    assert not list(tmp_path.iterdir())


def test_files_in_hidden_folders_are_none(tmp_path):
    for name in ("a/b.wav", ".git/c.wav", "a/.d/e.wav"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert list(files_under(tmp_path)) == [tmp_path / "a" / "b.wav"]


def test_a_folder_that_links_to_itself_is_gone_through_once(tmp_path, monkeypatch):
    """Two links, followed as deep as a system allows, would make 2 ** 40 paths."""
    (tmp_path / "a.wav").touch()
    for name in ("one", "two"):
        (tmp_path / name).symlink_to(tmp_path)
    places, realpath = [], os.path.realpath

    def counted(path):
        places.append(path)
        assert len(places) < 9
        return realpath(path)

    monkeypatch.setattr(os.path, "realpath", counted)
    assert list(files_under(tmp_path)) == [tmp_path / "a.wav"]


def test_a_folder_that_cannot_be_read_is_named_or_told(tmp_path):
    with pytest.raises(AudioError, match=r"/gone: No such file"):
        list(files_under(tmp_path / "gone"))
    skipped = []
    assert not list(files_under(tmp_path / "gone", skipped.append))
    assert [str(error) for error in skipped] == [f"{tmp_path}/gone: No such file or directory"]


def test_a_name_that_is_not_utf8_can_be_printed():
    assert printable(os.fsdecode("Grüße.wav".encode("latin-1"))) == "Gr\ufffd\ufffde.wav"
