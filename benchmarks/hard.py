#!/usr/bin/env python3
"""How the model that ships handles recordings that are hard on purpose.

    python benchmarks/hard.py CORPUS [--utterances 40] [asr.transcribe's options for decoding]

CORPUS is read speech with speakers, such as LibriSpeech's dev-clean, in any form that asr.corpus opens. Its first
utterances are spoiled (telephone, clipping, far field) and scored, as is one long file; the other recordings are shown
as transcribed. The foreign language and the numbers are spoken by espeak-ng, if it is installed: a robot is one more
difficulty.
"""

from __future__ import annotations

import argparse
import io
import itertools
import shutil
import subprocess
import time
from collections.abc import Callable

import numpy as np
import torch

from asr.audio._torchaudio import functional
from asr.audio.reading import SAMPLE_RATE, read_audio
from asr.commands import add_decoding_options, load_recognizer
from asr.corpus import iterate, open_corpus
from asr.decode.scoring import word_errors

LONG, PAUSE = 1200.0, 0.5  # seconds
DRAWS = 40  # recordings of each kind without speech
GERMAN = "Guten Morgen. Ich möchte am Freitag mit dem Zug nach Hamburg fahren, und zwar so früh wie möglich."
NUMBERS = "On 24 March 1998, at 10:45, 2,350 people paid $19.99 each."


def silence(rng: np.random.Generator) -> np.ndarray:
    return np.zeros(10 * SAMPLE_RATE, np.float32)


def noise(rng: np.random.Generator) -> np.ndarray:
    """1 to 15 s of noise whose power over frequency f is constant (white), or falls as 1/f (pink) or 1/f² (brown)."""
    spectrum = np.fft.rfft(rng.normal(size=int(rng.uniform(1, 15) * SAMPLE_RATE)))
    return _at(-20, np.fft.irfft(spectrum / np.arange(1, len(spectrum) + 1) ** rng.choice([0, 0.5, 1])))


def music(rng: np.random.Generator) -> np.ndarray:
    """Twenty half-second chords of plucked strings: a fundamental with eight falling harmonics."""
    t = np.arange(SAMPLE_RATE // 2) / SAMPLE_RATE
    chords = []
    for _ in range(20):
        roots = 110 * 2 ** (rng.choice([0, 3, 5, 7, 10, 12]) / 12) * 2 ** (np.array([0, 4, 7, 12]) / 12)
        partials = (np.sin(2 * np.pi * f * k * t) * np.exp(-(3 + k) * t) / k for f in roots for k in range(1, 9))
        chords.append(sum(partials))
    return _at(-10, np.concatenate(chords))


def _at(decibels: float, sound: np.ndarray) -> np.ndarray:
    """Scaled to a peak of `decibels` relative to full scale."""
    return (10 ** (decibels / 20) * sound / np.abs(sound).max()).astype(np.float32)


def quiet(sound: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Scaled to a peak 50 dB below full scale, in 16 bits."""
    return (2**15 * _at(-50, sound)).round() / 2**15


def telephone(sound: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Over a telephone line: 8 kHz, 300 to 3,400 Hz, eight bits of mu-law."""
    low = functional.resample(torch.from_numpy(sound), SAMPLE_RATE, SAMPLE_RATE // 2)
    low = functional.lowpass_biquad(functional.highpass_biquad(low, SAMPLE_RATE // 2, 300), SAMPLE_RATE // 2, 3400)
    low = functional.mu_law_decoding(functional.mu_law_encoding(low.clamp(-1, 1), 256), 256)
    return functional.resample(low, SAMPLE_RATE // 2, SAMPLE_RATE).numpy()


def clipped(sound: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Amplified to 20 dB above full scale, and clipped there."""
    return (10 * sound / np.abs(sound).max()).clip(-1, 1).astype(np.float32)


def far(sound: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """In a room with a reverberation time of 0.6 s, the direct sound as strong as the echoes, and noise 15 dB below."""
    t = np.arange(int(0.6 * SAMPLE_RATE)) / SAMPLE_RATE
    echoes = rng.normal(size=len(t)) * 10 ** (-3 * t / 0.6)
    response = torch.from_numpy((echoes / np.linalg.norm(echoes)).astype(np.float32))
    response[0] += 1
    heard = functional.fftconvolve(torch.from_numpy(sound), response).numpy()
    return (heard + rng.normal(0, heard.std() * 10 ** (-15 / 20), len(heard))).astype(np.float32)


SPOILED: dict[str, Callable] = {
    "telephone (8 kHz, mu-law)": telephone,
    "clipped by 20 dB": clipped,
    "far field": far,
    "50 dB below full scale": quiet,
}
NO_SPEECH: dict[str, Callable] = {"silence": silence, "noise": noise, "music": music}


def spoken(text: str, voice: str) -> np.ndarray | None:
    """The text as espeak-ng reads it; None if espeak-ng is not installed."""
    if not shutil.which("espeak-ng"):
        return None
    command = ["espeak-ng", "-v", voice, "-s", "140", "--stdout", text]
    return read_audio(io.BytesIO(subprocess.run(command, capture_output=True, check=True).stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus")
    parser.add_argument("--utterances", type=int, default=40)
    add_decoding_options(parser)
    args = parser.parse_args()
    recognizer = load_recognizer(args)
    normalize = recognizer.model.normalize
    cuts, sounds = zip(*iterate(open_corpus([args.corpus])), strict=True)
    texts = [normalize(cut.supervisions[0].text) for cut in cuts]

    def heard(these: list[np.ndarray]) -> list[str]:
        return [normalize(transcript.text) for transcript in recognizer.transcribe_all(these)]

    def row(name: str, result: str) -> None:
        print(f"| {name} | {result} |", flush=True)

    def show(name: str, sound: np.ndarray | None, said: str = "") -> None:
        text = "needs espeak-ng" if sound is None else repr(heard([sound])[0])
        row(name, f"said: {said!r}; heard: {text}" if said else text)

    print("| recording | what comes out |\n| --- | --- |")
    for name, make in NO_SPEECH.items():
        rng = np.random.default_rng(0)
        found = [text for text in heard([make(rng) for _ in range(DRAWS)]) if text]
        row(f"{name}, {DRAWS} times", f"{len(found)} have words: {found[:3]}" if found else "nothing")
    some, said = sounds[: args.utterances], texts[: args.utterances]
    row(f"{len(some)} utterances as they are", f"WER {word_errors(said, heard(list(some))).rate:.1f} %")
    for name, spoil in SPOILED.items():
        rng = np.random.default_rng(0)
        found = heard([spoil(sound, rng) for sound in some])
        row(f"the same, {name}", f"WER {word_errors(said, found).rate:.1f} %")
    first = cuts[0].supervisions[0].speaker
    other = next((i for i, cut in enumerate(cuts) if cut.supervisions[0].speaker != first), 1)
    size = min(len(sounds[0]), len(sounds[other]))
    show("two speakers at once", sounds[0][:size] + sounds[other][:size], f"{texts[0]} / {texts[other]}")
    show("German (espeak-ng)", spoken(GERMAN, "de"), GERMAN)
    show("numbers (espeak-ng)", spoken(NUMBERS, "en-us"), NUMBERS)
    ends = itertools.accumulate(len(sound) / SAMPLE_RATE + PAUSE for sound in sounds)
    count = sum(end <= LONG for end in ends)
    gap = np.zeros(int(PAUSE * SAMPLE_RATE), np.float32)
    whole = np.concatenate([part for sound in sounds[:count] for part in (sound, gap)])
    started = time.perf_counter()
    rate = word_errors([" ".join(texts[:count])], heard([whole])).rate
    took = time.perf_counter() - started
    row(f"one file of {len(whole) / SAMPLE_RATE / 60:.0f} minutes", f"WER {rate:.1f} %, in {took:.0f} s")


if __name__ == "__main__":
    main()
