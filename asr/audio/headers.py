"""How long an audio file is by its header, and whether that is true. libsndfile reads up to where it takes the end to
be, and reports neither what comes after it nor what is missing."""

from __future__ import annotations

import os
import re
from typing import BinaryIO

from soundfile import SoundFile

RATES = (100, 10_000_000)  # samples per second; other rates are taken for a damaged header
UNKNOWN = 2**60  # this many samples or more are in the header of a file that was written to a pipe
NO_SIZE = 0x7F000000  # this many bytes or more are in a 32-bit header whose writer could not go back: in a pipe
_TABLE = 4096  # bytes in which to look for an MP3's table, or for the tags at its end
_LONGEST_PAGE = 27 + 255 + 255 * 255  # bytes of an Ogg page
_TOLERANCE = 0.1  # seconds by which a header may promise too much


class AudioError(ValueError):
    """Audio that cannot be read; the message names it and says why."""


def check_rate(sound: SoundFile, name: str) -> None:
    """Raises AudioError for a sample rate that no recording has."""
    if not RATES[0] <= sound.samplerate <= RATES[1]:
        raise AudioError(f"{name}: its header says {sound.samplerate} samples per second")


def check_missing(seconds: float, name: str) -> None:
    """Raises AudioError if `seconds` that a header promises are missing: a copy was interrupted."""
    if seconds > _TOLERANCE:
        raise AudioError(f"{name}: cut off, the last {seconds:.1f} s are missing")


def is_estimate(sound: SoundFile, file: BinaryIO) -> bool:
    """Whether an MP3, just opened, has no table of its length (libsndfile then estimates it by the first frame)."""
    if sound.format != "MP3":
        return False
    place = file.tell()
    file.seek(max(0, place - _TABLE))
    head = file.read(_TABLE)
    file.seek(place)
    return not any(name in head for name in (b"Xing", b"Info", b"VBRI"))


def goes_on(sound: SoundFile, file: BinaryIO, name: str) -> bool:
    """Whether a file, just opened, has audio after the place that libsndfile takes for its end: joined MP3 or Ogg
    files, an MP3 of variable bit rate without a table, a wav whose writer was killed.

    Raises AudioError if a header promises more than there is."""
    if sound.format == "MP3":
        return _mp3_goes_on(sound, file)
    place = file.tell()
    try:
        if sound.format in ("WAV", "WAVEX"):
            return _wav_goes_on(sound, file, name)
        if sound.format == "OGG":
            return _ogg_goes_on(file, name)
        if sound.format in ("NIST", "AIFF", "AU", "RF64", "W64"):
            _check_whole(sound, file, name)
        return False
    finally:
        file.seek(place)


def _mp3_goes_on(sound: SoundFile, file: BinaryIO) -> bool:
    seconds = sound.seek(0, os.SEEK_END) / sound.samplerate
    end = file.tell()  # some frames before the end of what is read
    tags = file.read(_TABLE)  # of the kinds that end a file, and may be long
    size = file.seek(0, os.SEEK_END)
    file.seek(end)
    sound.seek(0)
    more = size - end > 1024 + 0.2 * end / max(seconds, 0.1)
    return more and not any(name in tags for name in (b"APETAGEX", b"LYRICSBEGIN"))


def _wav_goes_on(sound: SoundFile, file: BinaryIO, name: str) -> bool:
    begin = end = 0
    file.seek(12)
    while not begin and len(head := file.read(8)) == 8:  # the chunks of a RIFF file, up to the samples
        size = int.from_bytes(head[4:], "little")
        if head[:4] == b"data":
            begin = file.tell()
            end = begin + size
        else:
            file.seek(size + size % 2, os.SEEK_CUR)
    there = file.seek(0, os.SEEK_END)
    if not begin or end - begin >= NO_SIZE:
        return False
    check_missing((end - there) / max(1, there - begin) * sound.frames / sound.samplerate, name)
    file.seek(end)
    after = file.read(5)
    # a writer that was killed leaves an old header, and after the samples that it counts there is no chunk's name (some
    # writers omit the byte that makes its place even) and there are not only zeros
    is_chunk = any(all(32 <= byte < 127 for byte in letters) for letters in (after[:4], after[end % 2 :][:4]))
    if there - end <= 1024 or is_chunk:
        return False
    file.seek(end)
    return any(any(block) for block in iter(lambda: file.read(1 << 20), b""))


def _ogg_goes_on(file: BinaryIO, name: str) -> bool:
    """Whether there are several streams. Raises AudioError if the last page is cut off (RFC 3533, section 6)."""
    streams, rest = 0, b""
    file.seek(0)
    while block := file.read(1 << 20):
        streams += (rest + block).count(b"OggS\0\2")  # the first page of each stream
        rest = block[-5:]
    there = file.seek(0, os.SEEK_END)
    file.seek(max(0, there - _LONGEST_PAGE))
    tail = file.read()
    head = tail[max(0, tail.rfind(b"OggS")) :]
    segments = head[27 : 27 + head[26]] if len(head) > 26 else b""
    if head.startswith(b"OggS") and (len(head) < 27 or 27 + head[26] + sum(segments) > len(head)):
        raise AudioError(f"{name}: cut off within its last page")
    return streams > 1


def _check_whole(sound: SoundFile, file: BinaryIO, name: str) -> None:
    """Raises AudioError if a .sph, .aiff, .au, .rf64 or .w64 was cut off."""
    if sound.format == "NIST":
        file.seek(0)
        count = re.search(rb"sample_count -i (\d+)", file.read(1024))
        missing = (int(count[1]) if count else 0) - sound.frames
    else:  # libsndfile's log says what it found
        sizes = re.search(r": (\d+) \(should be (\d+)\)", sound.extra_info)
        promised, there = map(int, sizes.groups()) if sizes else (0, 1)
        is_told = promised < NO_SIZE or sound.format in ("RF64", "W64")
        missing = (promised - there) / max(1, there) * sound.frames if is_told else 0
    check_missing(missing / sound.samplerate, name)
