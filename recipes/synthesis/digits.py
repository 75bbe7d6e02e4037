#!/usr/bin/env python3
"""Synthesise the tour corpus: spoken digit strings in two small tars, `train.tar` and `dev.tar`.

    python recipes/synthesis/digits.py --kokoro kokoro-int8.onnx --voices voices --out data/digits --seed 0

`kokoro.py` says where the engine comes from; either of its models works, the shipped tars were made with the int8 one.
Each tar starts with `manifest.jsonl` (one JSON object per line, as in NeMo), then holds an Ogg Opus file per utterance.
The dev voices are in no training item, not even in a blend, and no dev digit string is in train. The same seed and
library versions on the same kind of CPU give the same bytes. It takes about 20 minutes on one core.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import struct
import tarfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
from kokoro import Kokoro, Speaker, blend, language_of, load_engine, load_voices, speak

from asr.audio.reading import SAMPLE_RATE

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DEV_VOICES = ("af_sarah", "am_michael", "bf_isabella", "bm_george")  # held out of train
ENGLISH = ("af_", "am_", "bf_", "bm_")  # American or British, female or male
LENGTHS = {  # how often a string has 1, 2, ... 7 digits; the ten one-digit strings belong to train
    "train": (0.08, 0.14, 0.18, 0.20, 0.18, 0.14, 0.08),
    "dev": (0.00, 0.17, 0.22, 0.24, 0.19, 0.12, 0.06),
}
SPEEDS = {"train": (0.85, 1.2), "dev": (0.9, 1.1)}
COMPRESSION = 0.968  # libsndfile's scale for Opus, about 14 kbit/s
MAX_BYTES = 4_000_000  # both tars together


@dataclass(frozen=True)
class Utterance:
    """The text of an utterance, its speaker, and its encoded audio."""

    id: str
    text: str
    speaker: str
    duration: float
    opus: bytes

    @property
    def filename(self) -> str:
        return f"{self.id}.opus"

    def manifest_line(self) -> str:
        entry = {
            "id": self.id,
            "audio_filepath": self.filename,
            "duration": round(self.duration, 4),
            "text": self.text,
            "speaker": self.speaker,
            "corpus": "digits",
        }
        return json.dumps(entry) + "\n"


def single_speakers(voices: dict[str, np.ndarray], names: Iterable[str]) -> list[Speaker]:
    return [Speaker(name, voices[name], language_of(name)) for name in names]


def blended_speakers(
    voices: dict[str, np.ndarray], names: Sequence[str], count: int, rng: np.random.Generator
) -> list[Speaker]:
    """`count` blends of two voices each, no pair twice; the first of a pair sets the accent."""
    pairs = list(itertools.combinations(names, 2))
    speakers = []
    for index in rng.choice(len(pairs), size=count, replace=False):
        first, second = pairs[index] if rng.random() < 0.5 else pairs[index][::-1]
        share = round(float(rng.uniform(0.5, 0.7)), 2)
        speakers.append(blend(voices, first, second, share, f"{first}+{second}"))
    return speakers


def digit_strings(
    count: int, length_shares: Sequence[float], taboo: set[tuple[int, ...]], rng: np.random.Generator
) -> list[tuple[int, ...]]:
    """`count` strings of 1 to 7 digits in which each digit is about equally frequent, none of them in `taboo`."""
    lengths = rng.choice(np.arange(1, len(length_shares) + 1), size=count, p=length_shares)
    deck = rng.permutation(np.arange(lengths.sum()) % 10).tolist()
    strings = [[deck.pop() for _ in range(length)] for length in lengths]
    while clashes := [index for index, string in enumerate(strings) if tuple(string) in taboo]:
        for index in clashes:  # swapping last digits keeps the balance
            other = int(rng.integers(count))
            strings[index][-1], strings[other][-1] = strings[other][-1], strings[index][-1]
    return [tuple(string) for string in strings]


def punctuate(words: Sequence[str], rng: np.random.Generator) -> str:
    """The text for the engine: some of the longer strings are split into two groups, like telephone numbers."""
    words = list(words)
    if len(words) >= 4 and rng.random() < 0.3:
        words[int(rng.integers(1, len(words) - 2))] += ","
    return " ".join(words) + "."


def ogg_crc_table() -> list[int]:
    table = []
    for value in range(256):
        value <<= 24
        for _ in range(8):
            value = (value << 1) ^ (0x04C11DB7 if value & 0x80000000 else 0)
        table.append(value & 0xFFFFFFFF)
    return table


OGG_CRC = ogg_crc_table()


def tidy_ogg(data: bytes, serial: int) -> bytes:
    """Sets the stream number, which libsndfile draws from the clock, and drops the 512 zeros that pad the tags."""
    pages, position = [], 0
    while position < len(data):
        start = position + 27 + data[position + 26]
        position, header, body = start + sum(data[position + 27 : start]), data[position:start], data[start:]
        body = body[: position - start]
        if body.startswith(b"OpusTags"):
            body = body[: 12 + struct.unpack_from("<I", body, 8)[0]] + bytes(4)  # the encoder's name, no comments
            header = header[:26] + bytes([1, len(body)])
        page = bytearray(header + body)
        struct.pack_into("<I", page, 14, serial)
        struct.pack_into("<I", page, 22, 0)
        crc = 0
        for byte in page:
            crc = ((crc << 8) & 0xFFFFFFFF) ^ OGG_CRC[(crc >> 24) ^ byte]
        struct.pack_into("<I", page, 22, crc)
        pages.append(bytes(page))
    return b"".join(pages)


def encode(audio: np.ndarray, serial: int) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, audio, SAMPLE_RATE, format="OGG", subtype="OPUS", compression_level=COMPRESSION)
    return tidy_ogg(buffer.getvalue(), serial)


def checked_duration(opus: bytes, audio: np.ndarray, digits: int, what: str) -> float:
    """Seconds of the decoded file; raises RuntimeError if it cannot hold `digits` digits, or is silent or clipped."""
    decoded, rate = soundfile.read(io.BytesIO(opus), dtype="float32")
    seconds, peak = len(decoded) / rate, float(np.abs(decoded).max(initial=0))
    pace = (seconds - 0.3) / digits
    if (
        rate != SAMPLE_RATE
        or abs(len(decoded) - len(audio)) > SAMPLE_RATE // 50
        or not 0.2 < peak < 1
        or not 0.15 < pace < 1.2
    ):
        raise RuntimeError(f"{what}: {rate} Hz, {seconds:.2f} s for {digits} digits, peak {peak:.2f}")
    return seconds


def synthesise(
    engine: Kokoro, speakers: Sequence[Speaker], strings: Sequence[tuple[int, ...]], split: str, seed: int
) -> list[Utterance]:
    """Says every string once; the speakers take turns."""
    utterances = []
    for number, digits in enumerate(strings):
        rng = np.random.default_rng([seed, split == "dev", number])  # so that an item is independent of those before it
        speaker = speakers[number % len(speakers)]
        words = [WORDS[digit] for digit in digits]
        speed = float(rng.uniform(*SPEEDS[split]))
        audio = speak(engine, punctuate(words, rng), speaker, speed, rng)
        opus = encode(audio, serial=number)
        name = f"digits-{split}-{number:04d}"
        duration = checked_duration(opus, audio, len(digits), f"{name} by {speaker.name}: {' '.join(words)}")
        utterances.append(Utterance(name, " ".join(words), speaker.name, duration, opus))
        if number % 50 == 49:
            print(f"{split}: {number + 1} of {len(strings)}", flush=True)
    return utterances


def write_tar(path: Path, utterances: Sequence[Utterance]) -> int:
    """Writes the manifest, then the audio, without this machine's time, user or file modes. Returns its size."""
    manifest = "".join(utterance.manifest_line() for utterance in utterances).encode()
    members = [("manifest.jsonl", manifest), *((utterance.filename, utterance.opus) for utterance in utterances)]
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)  # mtime, uid and gid are 0, the mode is 0644
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path.stat().st_size


def report(split: str, utterances: Sequence[Utterance], size: int) -> None:
    seconds = sum(utterance.duration for utterance in utterances)
    kbits = sum(len(utterance.opus) for utterance in utterances) * 8 / seconds / 1000
    speakers = len({utterance.speaker for utterance in utterances})
    counts = Counter(word for utterance in utterances for word in utterance.text.split())
    print(
        f"{split}: {len(utterances)} utterances, {seconds:.1f} s, {speakers} speakers, {counts.total()} digits "
        f"({min(counts.values())} to {max(counts.values())} of each), {kbits:.1f} kbit/s, {size} bytes"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", 1)[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--kokoro", type=Path, required=True, help="Kokoro's ONNX model")
    parser.add_argument("--voices", type=Path, required=True, help="folder of Kokoro's .bin voices")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("data/digits"), help="where train.tar and dev.tar go")
    parser.add_argument("--train", type=int, default=880, metavar="N", help="training utterances")
    parser.add_argument("--dev", type=int, default=104, metavar="N", help="dev utterances")
    parser.add_argument("--blends", type=int, default=24, metavar="N", help="blends of two training voices")
    args = parser.parse_args()

    rng = np.random.default_rng(args.seed)
    voices = load_voices(args.voices, ENGLISH)
    missing = sorted(set(DEV_VOICES) - set(voices))
    if missing:
        raise SystemExit(f"{args.voices} lacks the voices {', '.join(missing)}")
    train_names = [name for name in voices if name not in DEV_VOICES]
    speakers = {
        "dev": single_speakers(voices, DEV_VOICES),
        "train": single_speakers(voices, train_names) + blended_speakers(voices, train_names, args.blends, rng),
    }
    dev_strings = digit_strings(args.dev, LENGTHS["dev"], set(), rng)
    strings = {"dev": dev_strings, "train": digit_strings(args.train, LENGTHS["train"], set(dev_strings), rng)}
    engine = load_engine(args.kokoro, voices)

    args.out.mkdir(parents=True, exist_ok=True)
    total = 0
    for split in ("dev", "train"):
        utterances = synthesise(engine, speakers[split], strings[split], split, args.seed)
        size = write_tar(args.out / f"{split}.tar", utterances)
        report(split, utterances, size)
        total += size
    if total > MAX_BYTES:
        raise SystemExit(f"{total} bytes together, more than {MAX_BYTES}")


if __name__ == "__main__":
    main()
