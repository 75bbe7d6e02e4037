"""Containers that libsndfile cannot read."""

from pathlib import Path

import numpy as np
import pytest

from asr.audio.ffmpeg import _timed, decode_with_ffmpeg
from asr.audio.reading import SAMPLE_RATE, AudioError, read_audio, read_duration, stream_audio
from tests.audio.test_interrupts import Interrupted

av = pytest.importorskip("av")

RATE = 48_000


def encode(path: Path, codec: str, sides: np.ndarray, video: bool = False) -> Path:
    """Writes a file of samples `(channels, N)`, or of pictures only."""
    layout = ("mono", "stereo")[len(sides) - 1]
    with av.open(str(path), "w") as container:
        if video:
            stream = container.add_stream("mpeg4", rate=10)
            stream.width = stream.height = 64
            frames = [av.VideoFrame(64, 64, "yuv420p")]
        else:
            stream = container.add_stream(codec, rate=RATE, layout=layout)
            blocks = np.split(sides.astype(np.float32), range(960, sides.shape[1], 960), axis=1)
            frames = [av.AudioFrame.from_ndarray(np.ascontiguousarray(x), format="fltp", layout=layout) for x in blocks]
        for i, frame in enumerate([*frames, None]):
            if frame is not None and not video:
                frame.sample_rate, frame.pts = RATE, 960 * i
            container.mux(stream.encode(frame))
    return path


@pytest.fixture
def sides() -> np.ndarray:
    t = np.arange(6 * RATE) / RATE
    return np.stack([0.5 * np.sin(2 * np.pi * 440 * t), np.zeros(len(t))])


@pytest.mark.parametrize(("form", "codec"), [("webm", "libopus"), ("mkv", "libopus"), ("m4a", "aac")])
def test_several_channels_are_averaged_and_the_header_says_how_long_it_is(tmp_path, sides, form, codec, monkeypatch):
    path = encode(tmp_path / f"a.{form}", codec, sides)
    heard = read_audio(path)
    assert len(heard) / SAMPLE_RATE == pytest.approx(6, abs=0.05)
    assert np.abs(heard[SAMPLE_RATE:-SAMPLE_RATE]).max() == pytest.approx(0.25, rel=0.1)
    monkeypatch.setattr("asr.audio.reading._decode", lambda *args: pytest.fail("it was decoded"))
    assert read_duration(path) == pytest.approx(6, abs=0.05)


@pytest.mark.parametrize(
    ("form", "codec"), [("webm", "libopus"), ("mkv", "aac"), ("m4a", "aac"), ("mp4", "aac"), ("aac", "aac")]
)
def test_a_part_is_found_by_the_index_where_there_is_one(tmp_path, form, codec, monkeypatch):
    """In a recording of an hour, as in corpora of talks, not everything before the part is decoded."""
    noise = np.random.default_rng(0).normal(0, 1, (1, 40 * RATE))
    smooth = np.stack([np.convolve(noise[0], np.hanning(200), "same")])  # codecs hardly change it
    path = encode(tmp_path / f"a.{form}", codec, 0.3 * smooth / np.abs(smooth).max())
    whole = read_audio(path)
    frames = []
    resampler = av.AudioResampler
    monkeypatch.setattr(av, "AudioResampler", lambda **how: _Counting(resampler(**how), frames))
    for start in (0.0, 0.7, 31.7, 36.0):
        frames.clear()
        part = read_audio(path, start=start, end=start + 1.5)
        assert len(part) == 1.5 * SAMPLE_RATE
        first, late = round(start * SAMPLE_RATE), SAMPLE_RATE // 1000 if form in ("webm", "mkv") else 0
        places = range(max(0, first - late), first + late + 1)
        apart = min(np.abs(part - whole[place : place + len(part)]).max() for place in places)
        assert apart < 0.05 * np.abs(part).max(), start
        if form != "aac":
            assert sum(frames) < 10 * RATE


class _Counting:
    """A resampler that notes how much it is given."""

    def __init__(self, resampler, frames: list[int]):
        self.resampler, self.frames = resampler, frames

    def resample(self, frame):
        self.frames.append(frame.samples if frame else 0)
        return self.resampler.resample(frame)


def test_a_guess_at_the_length_of_what_was_written_to_a_pipe_is_not_believed(tmp_path, sides):
    class Pipe:
        written = b""

        def write(self, block) -> int:
            self.written += bytes(block)
            return len(block)

    pipe = Pipe()
    with av.open(pipe, "w", format="matroska") as container:
        stream = container.add_stream("pcm_s16le", rate=RATE, layout="mono")
        for i, block in enumerate(np.split(sides[:1].astype(np.float32), range(9600, sides.shape[1], 9600), axis=1)):
            whole = np.ascontiguousarray((32767 * block).astype(np.int16))
            frame = av.AudioFrame.from_ndarray(whole, format="s16", layout="mono")
            frame.sample_rate, frame.pts = RATE, 9600 * i
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    (tmp_path / "a.mkv").write_bytes(pipe.written)
    assert len(read_audio(tmp_path / "a.mkv")) / SAMPLE_RATE == pytest.approx(6, abs=0.01)
    assert read_duration(tmp_path / "a.mkv") == pytest.approx(6, abs=0.01)


@pytest.mark.parametrize(("form", "codec"), [("webm", "libopus"), ("mkv", "libopus"), ("caf", "pcm_s16le")])
def test_a_copy_that_was_interrupted_is_read_up_to_there(tmp_path, sides, form, codec):
    path = encode(tmp_path / f"a.{form}", codec, sides)
    path.write_bytes(path.read_bytes()[: int(0.6 * path.stat().st_size)])
    heard = 0
    with pytest.raises(AudioError, match=r"cut off, the last 2\.\d s are missing"):
        for block in stream_audio(path):
            heard += len(block)
    assert 3 < heard / SAMPLE_RATE < 4


def test_a_file_that_is_damaged_within_is_read_up_to_there(tmp_path, sides):
    path = encode(tmp_path / "a.aac", "aac", sides)
    path.write_bytes(path.read_bytes()[: int(0.6 * path.stat().st_size)])
    with pytest.raises(AudioError, match=r"a\.aac: damaged after 3\.\d s"):
        read_audio(path)


def test_a_channel_that_there_is_not_is_named(tmp_path, sides):
    with pytest.raises(AudioError, match="its channels are 0 to 1, not 2"):
        read_audio(encode(tmp_path / "a.m4a", "aac", sides), channel=2)


@pytest.mark.parametrize(("form", "codec"), [("webm", "libopus"), ("mkv", "aac"), ("mp4", "aac")])
@pytest.mark.parametrize("start", [0.0, 2.4])
def test_times_are_those_at_which_a_player_is(tmp_path, sides, form, codec, start):
    """Pictures from the start on, sound from 2 s to 5 s and, after a pause, from 9 s to 12 s."""
    path = tmp_path / f"a.{form}"
    with av.open(str(path), "w") as container:
        pictures = container.add_stream("libvpx" if form == "webm" else "mpeg4", rate=10)
        pictures.width = pictures.height = 64
        sound = container.add_stream(codec, rate=RATE, layout="mono")
        packets = [
            p for f in [*(av.VideoFrame(64, 64, "yuv420p") for _ in range(130)), None] for p in pictures.encode(f)
        ]
        for i in range(0, 6 * RATE, 960):
            block = np.ascontiguousarray(sides[:1, i : i + 960].astype(np.float32))
            frame = av.AudioFrame.from_ndarray(block, format="fltp", layout="mono")
            frame.sample_rate, frame.pts = RATE, i + (2 if i < 3 * RATE else 6) * RATE
            packets += sound.encode(frame)
        packets += sound.encode(None)
        for packet in sorted(packets, key=lambda packet: packet.pts * packet.time_base):
            container.mux(packet)
    heard = read_audio(path, start=start)
    loud = np.abs(heard[: len(heard) // 160 * 160]).reshape(-1, 160).max(axis=1) > 0.1
    changes = start + 0.01 * (np.flatnonzero(np.diff(loud.astype(int))) + 1)
    assert changes[changes < 11] == pytest.approx([2, 5, 9] if start == 0 else [5, 9], abs=0.06)
    assert start + len(heard) / SAMPLE_RATE == pytest.approx(12, abs=0.05)
    assert read_duration(path) == pytest.approx(12, abs=0.1)


def test_a_broken_clock_is_not_followed():
    class Frame:
        samples, rate = 960, RATE

        def __init__(self, time: float | None):
            self.time = time

    times = [0.5, 0.52, 0.7, None, 9000.0, 9000.02, 9000.5]
    silences = [silence for _, silence in _timed(map(Frame, times), 0.0, 0.5, longest=10.0)]
    assert silences == pytest.approx([0, 0, 0.16, 0.16, 0.16, 0.16, 0.62])
    silences = [silence for _, silence in _timed(map(Frame, times), 0.0, 0.5, longest=10_000.0)]
    assert silences == pytest.approx([0, 0, 0.16, 0.16, 8999.42, 8999.42, 8999.88])


@pytest.mark.parametrize("form", ["webm", "mp4"])
def test_sound_alone_begins_where_it_does_and_a_long_pause_is_one(tmp_path, sides, form):
    path = tmp_path / f"a.{form}"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libopus", rate=RATE, layout="mono")
        for i in range(0, 4 * RATE, 960):
            block = np.ascontiguousarray(sides[:1, i : i + 960].astype(np.float32))
            frame = av.AudioFrame.from_ndarray(block, format="fltp", layout="mono")
            frame.sample_rate, frame.pts = RATE, i + (7 if i < 2 * RATE else 4007) * RATE
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    assert sum(map(len, stream_audio(path))) / SAMPLE_RATE == pytest.approx(4004, abs=0.1)
    assert read_duration(path) == pytest.approx(4004, abs=0.1)


def test_the_soundtrack_of_a_film_is_averaged(tmp_path, sides):
    with av.open(str(tmp_path / "a.mka"), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=RATE, layout="7.1")
        several = np.stack([sides[0] * (i == 3) for i in range(8)], axis=1)[:RATE]
        frame = av.AudioFrame.from_ndarray((32767 * several).astype(np.int16).reshape(1, -1), "s16", "7.1")
        frame.sample_rate, frame.pts = RATE, 0
        container.mux(stream.encode(frame))
    assert np.abs(read_audio(tmp_path / "a.mka")).max() == pytest.approx(0.5 / 8, rel=0.1)
    assert np.abs(read_audio(tmp_path / "a.mka", channel=3)).max() == pytest.approx(0.5, rel=0.1)
    assert np.abs(read_audio(tmp_path / "a.mka", channel=4)).max() == 0


def test_pictures_alone_are_no_sound(tmp_path, sides):
    with pytest.raises(AudioError, match="there is no sound in it"):
        read_audio(encode(tmp_path / "a.mp4", "", sides, video=True))


@pytest.mark.parametrize(("form", "codec"), [("webm", "libopus"), ("m4a", "aac")])
@pytest.mark.parametrize("begin", [0, 4])
@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_while_a_file_is_decoded_is_no_damage_of_it(tmp_path, sides, form, codec, begin):
    content = encode(tmp_path / f"a.{form}", codec, sides).read_bytes()
    for nth in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            list(decode_with_ffmpeg(SAMPLE_RATE, Interrupted(content, nth), "a", "", begin, None))
