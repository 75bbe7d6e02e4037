"""Decoding with FFmpeg (through PyAV, an extra) what libsndfile cannot read: m4a, mp4, webm and the like."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import chain, groupby
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from asr.audio.headers import AudioError, check_missing
from asr.audio.interrupts import undisturbed

if TYPE_CHECKING:
    from av.audio.frame import AudioFrame
    from av.audio.stream import AudioStream
    from av.container import InputContainer

INDEXED = ("mov", "matroska")  # FFmpeg's names for m4a and mp4, and for mkv and webm
RUN_UP = 1.0  # seconds decoded before the requested part: as far back as decoders and resamplers remember
HOLE = 0.1  # seconds between two frames that are a pause: less is how containers round, and what encoders add
LONGEST_HOLE = 3600.0  # seconds between two frames, if the container does not say how long it is: more is no pause
CLOCK_JUMP = 10.0  # seconds likewise in streams, whose clock may start anew (FFmpeg's dts_delta_threshold)
LATE = 0.5  # seconds before the end by the header at which audio may end: encoders and other streams add some


def decode_with_ffmpeg(
    sample_rate: int, file: BinaryIO, name: str, reason: str, begin: int, channel: int | None
) -> Iterator[np.ndarray]:
    """Blocks of samples `(N,)` of the first audio stream, of one `channel` or the mean of all, from `begin` seconds on
    (to a millisecond in Matroska). Times are a player's, from the start of the first stream of all on; where the audio
    starts later or has a hole there is silence. Raises AudioError, after what could be read, if the file is damaged or
    ends before its header says; and, if PyAV is missing, with `reason`: why the file was not read without it."""
    try:
        import av
    except ImportError:
        raise AudioError(f"{name}: {reason} FFmpeg may be able to read it: pip install '.[av]'") from None
    heard = 0.0
    try:
        with _opened(file) as container:
            if not container.streams.audio:
                raise AudioError(f"{name}: there is no sound in it")
            duration = _duration(container)
            frames, heard = _frames(container, begin)
            unwanted = round((begin - heard) * sample_rate)
            for samples in _resampled(_timed(frames, heard, _zero(container), _longest_hole(container)), sample_rate):
                if not 0 <= (channel or 0) < len(samples):
                    raise AudioError(f"{name}: its channels are 0 to {len(samples) - 1}, not {channel}")
                heard += samples.shape[1] / sample_rate
                mono = samples.mean(axis=0) if channel is None else samples[channel]
                yield mono[max(0, unwanted) :]
                unwanted -= len(mono)
    except AudioError:
        raise
    except (av.FFmpegError, ValueError) as error:
        what = f"damaged after {heard:.1f} s" if heard else "not a sound file"
        raise AudioError(f"{name}: {what} ({getattr(error, 'strerror', None) or error})") from None
    if duration is not None and duration - heard > LATE:
        check_missing(duration - heard, name)


def duration_by_ffmpeg(file: BinaryIO) -> float | None:
    """Duration in seconds by the header; None if it does not say, or FFmpeg is missing."""
    with contextlib.suppress(ImportError):
        import av

        with contextlib.suppress(av.FFmpegError), _opened(file) as container:
            return _duration(container)
    return None


def _resampled(frames: Iterator[tuple[AudioFrame, float]], sample_rate: int) -> Iterator[np.ndarray]:
    """Blocks `(channels, N)` at `sample_rate` of frames as `_timed` gives them, silence included."""
    import av

    filled = 0.0
    kinds = groupby(frames, lambda timed: (timed[0].format.name, timed[0].layout.name, timed[0].rate, timed[1]))
    for (_, layout, _, silence), alike in kinds:
        missing, filled = round((silence - filled) * sample_rate), silence
        channels = av.AudioLayout(layout).nb_channels
        for done in range(0, missing, sample_rate):
            yield np.zeros((channels, min(sample_rate, missing - done)), np.float32)
        # packed: PyAV 18 reads beyond the planes of 8 and 9 channels
        resampler = av.AudioResampler(format="flt", rate=sample_rate)
        for frame in chain((frame for frame, _ in alike), [None]):
            for piece in resampler.resample(frame):
                yield piece.to_ndarray().reshape(-1, channels).T


def _timed(
    frames: Iterator[AudioFrame], place: float, zero: float, longest: float
) -> Iterator[tuple[AudioFrame, float]]:
    """Frames from `place` (in seconds) on, each with the silence in seconds that belongs before it, in all: a video's
    sound may start after its pictures, and stop where a recorder was paused or heard nothing. What is longer than
    `longest` is no pause, but a clock that was set."""
    silence = 0.0
    for frame in frames:
        if frame.time is not None and (hole := frame.time - zero - place) > HOLE:
            if hole > longest:
                zero += hole
            else:
                silence += hole
                place += hole
        place += frame.samples / frame.rate
        yield frame, silence


def _longest_hole(container: InputContainer) -> float:
    if not container.format.name.startswith(INDEXED):
        return CLOCK_JUMP
    return LONGEST_HOLE if container.duration is None else container.duration / 1e6


def _zero(container: InputContainer) -> float:
    """The presentation time in seconds at which a player starts: that of the first of all streams."""
    return (container.start_time or 0) / 1e6


def _frames(container: InputContainer, begin: int) -> tuple[Iterator[AudioFrame], float]:
    """Frames of the first audio stream from a place before `begin` seconds on, and that place in seconds: the start, if
    the container has no index to find another."""
    import av

    stream: AudioStream = container.streams.audio[0]
    if begin > RUN_UP and container.format.name.startswith(INDEXED) and stream.start_time is not None:
        zero = _zero(container)
        with contextlib.suppress(av.FFmpegError), undisturbed():
            container.seek(round(1e6 * (zero + begin - RUN_UP)))
        frames = _decoded(container)
        first = next(frames, None)
        if first is not None and first.time is not None and first.time - zero <= begin:
            return chain([first], frames), first.time - zero
        container.seek(0)
    return _decoded(container), 0.0


def _decoded(container: InputContainer) -> Iterator[AudioFrame]:
    frames = container.decode(audio=0)
    while True:
        with undisturbed():
            frame = next(frames, None)
        if frame is None:
            return
        yield frame


def _opened(file: BinaryIO) -> InputContainer:
    import av

    major = int(av.__version__.partition(".")[0])
    titles = {"metadata_errors": "replace"} if major < 19 else {}  # 19 takes those of all encodings, and no such option
    with undisturbed():
        return av.open(file, options={"ignore_length": "1"}, **titles)


def _duration(container: InputContainer) -> float | None:
    """Where the first audio stream ends. A Matroska header has the duration of all streams together; FFmpeg's value
    for a single one is a guess from its bit rate."""
    if not container.streams.audio:
        return None
    stream: AudioStream = container.streams.audio[0]
    if container.format.name.startswith("mov"):
        if stream.duration is None:
            return None
        return float(((stream.start_time or 0) + stream.duration) * stream.time_base) - _zero(container)
    if container.format.name == "caf":  # whose stream.duration is that of what is left of a copy
        return float(stream.frames * stream.time_base) or None
    is_told = (
        container.format.name.startswith("matroska") and stream.duration is None and container.duration is not None
    )
    return container.duration / 1e6 - _zero(container) if is_told and len(container.streams) == 1 else None
