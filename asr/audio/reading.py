"""Reading audio: any file that libsndfile (or, if PyAV is installed, FFmpeg) can decode becomes mono float32 at 16 kHz.
Lines of text are read here, too.

Everything streams in blocks, so that a file of any length is read in bounded memory.
"""

from __future__ import annotations

import codecs
import contextlib
import importlib.util
import io
import math
import os
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np
import soundfile

from asr.audio.ffmpeg import decode_with_ffmpeg, duration_by_ffmpeg
from asr.audio.headers import UNKNOWN, AudioError, check_missing, check_rate, goes_on, is_estimate
from asr.audio.interrupts import undisturbed

SAMPLE_RATE = 16_000
STEPS_PER_SECOND = 100  # a matrix of T frames, or a text of T characters, counts as T / 100 s in batches and limits
AUDIO_SUFFIXES = frozenset(
    f".{name}"
    for name in "wav flac ogg oga opus mp3 aiff aif au sph w64 rf64 caf m4a mp4 mov webm mkv aac wma".split()  # noqa: SIM905
)
LOUDEST = 2**31  # louder samples are taken for damage; 32-bit integers written as floats are not
_BLOCK_SECONDS = 30
_MARGIN = 0.2  # seconds around a part of a file that are decoded, too: the reach of resamplers and decoders
_FINEST = 640  # largest denominator of a rate as a fraction of 16 kHz: 11,025 Hz needs it

Source = str | os.PathLike | bytes | BinaryIO


def files_under(folder: str | os.PathLike, skip: Callable[[AudioError], None] | None = None) -> Iterator[Path]:
    """All files in a folder and its subfolders, also in linked ones, in any order; hidden ones are left out. A folder
    that cannot be read is reported to `skip`; without `skip`, raises AudioError."""

    def unreadable(error: OSError) -> None:
        failure = AudioError(f"{printable(error.filename)}: {error.strerror}")
        if skip is None:
            raise failure
        skip(failure)

    seen = set()
    for parent, folders, files in os.walk(folder, followlinks=True, onerror=unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        place = os.path.realpath(parent)
        if place in seen:  # a link to a folder that contains it
            folders.clear()
            continue
        seen.add(place)
        yield from (Path(parent, name) for name in files if not name.startswith("."))


def printable(path: str | os.PathLike) -> str:
    """A path as text: whatever is not UTF-8 becomes U+FFFD."""
    return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in os.fsdecode(path))


def read_audio(
    source: Source,
    name: str | None = None,
    start: float = 0.0,
    end: float = math.inf,
    channel: int | None = None,
) -> np.ndarray:
    """Samples `(N,)`, float32 in [-1, 1] (a file's own floats as they are), 16 kHz, of a path, `-` (standard input),
    bytes or a binary file: those from `start` to `end` seconds, as far as there are any. As little of the rest is
    decoded as the format allows. Several channels are averaged, or `channel` selects one, counted from 0.

    `name` is what errors call the source. Raises AudioError if the source is missing, empty or not audio.
    """
    begin = max(0, math.floor(start - _MARGIN))
    stop = None if end == math.inf else math.ceil(end + _MARGIN)
    first = round(start * SAMPLE_RATE) - begin * SAMPLE_RATE
    last = sys.maxsize if stop is None else round(end * SAMPLE_RATE) - begin * SAMPLE_RATE
    blocks = list(_between(stream_audio(source, name, channel, begin, stop), first, last))
    return np.concatenate(blocks) if blocks else np.zeros(0, np.float32)


def stream_audio(
    source: Source, name: str | None = None, channel: int | None = None, begin: int = 0, stop: int | None = None
) -> Iterator[np.ndarray]:
    """The samples of `read_audio` from `begin` seconds on, as far as there are any, up to about `stop`: in blocks of
    about 30 s."""
    name = name or _name(source)
    with _open(source, name) as file:
        yield from _decode(file, name, begin, stop, channel)


def _name(source: Source) -> str:
    """What errors call the source."""
    return "<bytes>" if isinstance(source, bytes) else "<stdin>" if source == "-" else str(source)


def _between(blocks: Iterator[np.ndarray], first: int, last: int) -> Iterator[np.ndarray]:
    """The samples of the blocks from `first` up to `last` (exclusive)."""
    place = 0
    for block in blocks:
        yield block[max(0, first - place) : max(0, last - place)]
        place += len(block)
        if place >= last:
            return


def read_duration(source: Source, name: str | None = None) -> float:
    """Duration in seconds, from the header if the format has it. Raises AudioError like `read_audio`."""
    name = name or _name(source)
    with _open(source, name) as file:
        with contextlib.suppress(soundfile.LibsndfileError), undisturbed(), soundfile.SoundFile(file) as sound:
            check_rate(sound, name)
            if sound.frames < UNKNOWN and not is_estimate(sound, file) and not goes_on(sound, file, name):
                return sound.frames / sound.samplerate
        file.seek(0)
        if (seconds := duration_by_ffmpeg(file)) is not None:
            return seconds
        file.seek(0)
        return sum(map(len, _decode(file, name, 0, None, None))) / SAMPLE_RATE


def read_lines(source: Source, name: str | None = None) -> Iterator[str]:
    """The lines of a text file in UTF-8 (`-`: standard input), without line ends; `name` is what errors call the file.
    Raises AudioError if it is not text."""
    name = name or _name(source)
    with _open(source, name) as file:
        for number, line in enumerate(file, 1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError:
                raise AudioError(f"{name}, line {number}: not text in UTF-8") from None


def write_wav(path: str | os.PathLike, samples: np.ndarray) -> None:
    """Writes mono float samples `(N,)` at 16 kHz in the format of the file's suffix, into a folder that is created if
    missing. If it cannot be written completely, raises OSError naming the file, and leaves none; a file that must not
    be written stays."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).open("ab").close()
    try:
        soundfile.write(path, within_range(samples), SAMPLE_RATE)
    except soundfile.LibsndfileError as error:
        Path(path).unlink(missing_ok=True)
        raise OSError(f"{path}: not written ({error})") from None


def within_range(samples: np.ndarray) -> np.ndarray:
    """`samples (N,)`, scaled down if they exceed [-1, 1], where a file of integers would clip them."""
    peak = np.abs(samples).max(initial=0.0)
    return samples / peak if peak > 1 else samples


def _open(source: Source, name: str) -> BinaryIO:
    if isinstance(source, bytes):
        return io.BytesIO(source)
    if hasattr(source, "read"):
        try:
            return io.BytesIO(source.read())
        except (OSError, TypeError, ValueError) as error:  # closed, or open for text or for writing
            raise AudioError(f"{name}: cannot be read as bytes ({error})") from None
    if source == "-":
        if sys.stdin is None:  # as in a service
            raise AudioError(f"{name}: there is no standard input")
        return io.BytesIO(sys.stdin.buffer.read())
    try:
        with open(source, "rb") as named:
            # without its name: libsndfile takes any file called .raw for samples of an unknown rate
            file = open(os.dup(named.fileno()), "rb")  # noqa: SIM115 (the callers close it)
    except FileNotFoundError:
        raise AudioError(f"{name}: no such file") from None
    except OSError as error:
        raise AudioError(f"{name}: {error.strerror}") from None
    except ValueError as error:  # a null character
        raise AudioError(f"{name}: {error}") from None
    if file.seekable():
        return file
    with file:  # a pipe
        return io.BytesIO(file.read())


def _decode(file: BinaryIO, name: str, begin: int, stop: int | None, channel: int | None) -> Iterator[np.ndarray]:
    def by_ffmpeg(reason: str) -> Iterator[np.ndarray]:
        file.seek(0)
        blocks = decode_with_ffmpeg(SAMPLE_RATE, file, name, reason, begin, channel)
        return (_finite(block, name) for block in blocks)

    if not file.read(1):
        raise AudioError(f"{name}: the file is empty")
    file.seek(0)
    try:
        with undisturbed():
            sound = soundfile.SoundFile(file)
    except soundfile.LibsndfileError as error:
        file.seek(0)
        if _is_text(file.read(1000)):
            raise AudioError(f"{name}: this is text, not audio") from None
        yield from by_ffmpeg(str(error))
        return
    with sound:
        promised = sound.frames if sound.format == "MP3" and not is_estimate(sound, file) else 0
        if sound.frames >= UNKNOWN:  # libsndfile loses its place in such a file
            yield from by_ffmpeg("the header does not say how long it is.")
            return
        longer = cut_off = None
        try:
            with undisturbed():
                longer = goes_on(sound, file, name)
        except AudioError as error:
            cut_off = error  # raised after what is there
        if longer:
            more = "there is more in it than its header says."
            if importlib.util.find_spec("av"):
                yield from by_ffmpeg(more)
                return
            cut_off = AudioError(f"{name}: {more} FFmpeg may read it: pip install '.[av]'")
        check_rate(sound, name)
        skipped = begin if sound.seekable() else 0
        if skipped:
            try:
                with undisturbed():
                    sound.seek(min(skipped * sound.samplerate, sound.frames))
            except soundfile.LibsndfileError as error:
                raise AudioError(f"{name}: damaged before {skipped} s ({error})") from None
        most = sys.maxsize if stop is None else (stop - skipped) * sound.samplerate
        if not 0 <= (channel or 0) < sound.channels:
            raise AudioError(f"{name}: its channels are 0 to {sound.channels - 1}, not {channel}")
        blocks = _soundfile_blocks(sound, file, most, promised, name)
        only = 0 if sound.channels == 1 else channel
        mono = (block.mean(axis=1) if only is None else block[:, only] for block in blocks)
        yield from _between(resampled(mono, sound.samplerate), (begin - skipped) * SAMPLE_RATE, sys.maxsize)
        if cut_off:
            raise cut_off


def _is_text(head: bytes) -> bool:
    """Whether a file that starts with `head` is text in UTF-8 (the last character of `head` may be cut off)."""
    head = head.removeprefix(codecs.BOM_UTF8)
    text = head.decode("utf-8", errors="ignore")
    return len(head) - len(text.encode()) < 4 and all(c.isprintable() or c.isspace() for c in text)


def _soundfile_blocks(
    sound: soundfile.SoundFile, file: BinaryIO, most: int, promised: int, name: str
) -> Iterator[np.ndarray]:
    """Blocks of at most `most` frames in all. Raises AudioError after those before any damage, and if the audio ends
    before `promised` frames."""
    can_seek = sound.seekable()
    place = sound.tell() if can_seek else 0
    size = _BLOCK_SECONDS * sound.samplerate
    if sound.format == "MP3":  # soundfile would seek to where each block ends, and mpg123 print errors of its own there
        sound.seekable = lambda: False
    while most > 0:
        try:
            with undisturbed():
                block = sound.read(min(most, size), dtype="float32", always_2d=True)
        except soundfile.LibsndfileError as error:
            if can_seek and size > sound.samplerate // 4:  # again, nearly up to the damage
                size = max(1, sound.samplerate // 4)
                file.seek(0)
                with contextlib.suppress(soundfile.LibsndfileError), undisturbed():
                    sound = soundfile.SoundFile(file)
                    sound.seek(place)
                    continue
            raise AudioError(f"{name}: damaged after {place / sound.samplerate:.1f} s ({error})") from None
        if not len(block):
            check_missing((promised - place) / sound.samplerate, name)
            return
        yield _finite(block, name)
        most -= len(block)
        place += len(block)


def _finite(block: np.ndarray, name: str) -> np.ndarray:
    """Replaces NaN with silence, infinity with full scale. Raises AudioError for samples that are far too loud."""
    peak = np.abs(block).max(initial=0.0)
    if not np.isfinite(peak):
        block = np.nan_to_num(block, nan=0.0, posinf=1.0, neginf=-1.0)
        peak = np.abs(block).max(initial=0.0)
    if peak > LOUDEST:
        raise AudioError(f"{name}: damaged (a sample of {peak:g})")
    return block


def resampled(blocks: Iterator[np.ndarray], rate: int) -> Iterator[np.ndarray]:
    """Resamples `(N,)` samples from `rate` to 16 kHz, block by block, with as much of the neighbours as the filter
    reaches: the same as in one piece.

    A rate with few divisors in common with 16 kHz would need very many filters and is replaced with a close one that
    has more: the rates of files are met to 5 ms per hour, 16,005 Hz is taken for 16,000."""
    ratio = Fraction(rate, SAMPLE_RATE).limit_denominator(_FINEST)
    if ratio == 1:
        yield from blocks
        return
    import torch

    from asr.audio._torchaudio import functional

    step_in, step_out = ratio.numerator, ratio.denominator
    reach = math.ceil(0.01 * rate / step_in)  # 10 ms of context on each side, in steps; silence before and after it all
    heard = written = 0
    buffer = np.zeros(reach * step_in, np.float32)
    for block in chain(blocks, [None]):
        if block is None:
            block = np.zeros(reach * step_in + -heard % step_in, np.float32)
        else:
            heard += len(block)
        buffer = np.concatenate([buffer, block])
        steps = len(buffer) // step_in - 2 * reach
        if steps < 1:
            continue
        chunk = torch.from_numpy(buffer[: (steps + 2 * reach) * step_in])
        out = functional.resample(chunk, step_in, step_out).numpy()[reach * step_out : (reach + steps) * step_out]
        out = out[: math.ceil(heard * step_out / step_in) - written]
        yield out
        written += len(out)
        buffer = buffer[steps * step_in :]
