"""WER of the model that ships on a long recording: cut at its pauses, or in one piece with full or windowed attention.

    python benchmarks/one_piece.py CORPUS [--minutes 10] [--windows 32 64 125]

CORPUS is read speech in any form that asr.corpus opens; the recording consists of its first utterances, with half a
second of silence between them.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

import asr
from asr.audio.reading import SAMPLE_RATE
from asr.corpus import iterate, open_corpus
from asr.decode.options import DecodeOptions
from asr.decode.recognizer import Recognizer
from asr.decode.scoring import word_errors

PAUSE = np.zeros(SAMPLE_RATE // 2, np.float32)


def concatenation(corpus: str, minutes: float) -> tuple[np.ndarray, str]:
    parts, texts, seconds = [], [], 0.0
    for cut, sound in iterate(open_corpus(corpus)):
        parts += [sound, PAUSE]
        texts.append(cut.supervisions[0].text)
        seconds += (len(sound) + len(PAUSE)) / SAMPLE_RATE
        if seconds >= 60 * minutes:
            break
    return np.concatenate(parts), " ".join(texts)


def row(name: str, recognizer: Recognizer, sound: np.ndarray, said: str) -> None:
    started = time.process_time()
    heard = recognizer.transcribe(sound).text
    took = time.process_time() - started
    normalize = recognizer.model.normalize
    print(f"| {name} | {word_errors([normalize(said)], [normalize(heard)]).rate:.1f} % | {took:.1f} s |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--windows", type=int, nargs="*", default=[32, 64, 125], help="frames of 80 ms on each side")
    parser.add_argument("--strategies", nargs="+", default=["beam", "ctc"])
    args = parser.parse_args()
    sound, said = concatenation(args.corpus, args.minutes)
    print(f"{len(sound) / SAMPLE_RATE:.0f} s, {len(said.split())} words\n| | WER | CPU time |\n| --- | --- | --- |")
    for strategy in args.strategies:
        settings = {} if strategy == "beam" else {"options": DecodeOptions(strategy, beam_size=1)}
        row(f"{strategy}, cut at pauses", asr.load(**settings), sound, said)
        whole = asr.load(piece_seconds=86400, **settings)
        row(f"{strategy}, one piece", whole, sound, said)
        for window in args.windows:
            whole.model.transformer.set_window(window, window)
            row(f"{strategy}, one piece, {window} frames on each side", whole, sound, said)


if __name__ == "__main__":
    main()
