#!/usr/bin/env python3
"""How soon `asr.listen` shows a word, and how many words it takes back.

    python benchmarks/listen.py CORPUS [--limit 40] [--between 0.5] [--drafts rescore] [--every 0.5] [--pause 0.5]

Utterances, `--between` seconds apart, form one recording that is transcribed while it is spoken: the clock is that of
the computation, and jumps ahead where the computation would wait for audio. A word's delay is the time from its end
until it is first `shown` in its place (at most two words off) as in the final segment, until it is `settled`, and until
the segment has `ended`. `changed` is the share of settled words that differ in the final segment.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator

OFF = 2  # words by which a word's place may differ


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", help="a corpus in any form")
    parser.add_argument("--limit", type=int, default=40, help="utterances of it")
    parser.add_argument("--between", type=float, default=0.5, help="seconds between them")
    parser.add_argument("--drafts", help="as of asr.listen")
    parser.add_argument("--every", type=float, default=0.5, help="seconds between two drafts at least")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds of one that ends a piece")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--model", help="model folder (default: the model that ships)")
    return parser


class Clock:
    """The time in a recording, which goes on while its listener computes."""

    def __init__(self, sound, every: float):
        self.sound, self.every = sound, every
        self.ahead = 0.0  # seconds of waiting for audio that were skipped
        self.began = time.perf_counter()

    @property
    def now(self) -> float:
        return time.perf_counter() - self.began + self.ahead

    def blocks(self) -> Iterator:
        """The audio that has come in since the last block, `every` seconds or more: up to so much later than a pipe."""
        done, rate = 0, 16_000
        while done < len(self.sound):
            self.ahead += max(0.0, done / rate + self.every - self.now)
            there = min(len(self.sound), int(self.now * rate))
            yield self.sound[done:there]
            done = there


def main() -> None:
    args = parser().parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    import jiwer
    import numpy as np

    import asr
    from asr.corpus import iterate, open_corpus
    from asr.decode.listening import drafter_of, listen
    from asr.text.normalizer import english

    recognizer = asr.load(args.model, word_times=True)
    silence, sounds, said = np.zeros(round(args.between * 16_000), np.float32), [], []
    for cut, sound in iterate(open_corpus(args.corpus).subset(first=args.limit)):
        sounds += [sound, silence]
        said.append(cut.supervisions[0].text)
    sound, said = np.concatenate(sounds), english(" ".join(said))
    recognizer.transcribe(sound[: 20 * 16_000])  # warms up

    began = time.perf_counter()
    whole = recognizer.transcribe(sound).text
    seconds = time.perf_counter() - began
    clock = Clock(sound, args.every)
    shown, settled, ended, changed, count, heard = [], [], [], 0, 0, []
    drafts: list[tuple[float, list[str], int]] = []  # of one segment: time, words, and how many are settled
    for update in listen(recognizer, clock.blocks(), drafter_of(recognizer, args.drafts), args.every, args.pause):
        now = clock.now
        for segment in update.segments:
            words = [word.text for word in segment.words]
            heard += words
            drafts.append((now, words, len(words)))
            for i, word in enumerate(segment.words):
                seen = [at for at, draft, _ in drafts if places(draft, i, word.text)]
                agreed = [at for at, draft, n in drafts if any(j < n for j in places(draft, i, word.text))]
                shown.append(seen[0] - word.end)
                settled.append(agreed[0] - word.end)
                ended.append(now - word.end)
            before = drafts[-2] if len(drafts) > 1 else (0.0, [], 0)
            last = before[1][: before[2]]
            count += len(last)
            changed += sum(not places(words, i, word) for i, word in enumerate(last))
            drafts = []
        if update.start is not None:
            agreed = update.settled.split()
            drafts.append((now, agreed + update.tentative.split(), len(agreed)))
    busy = clock.now - clock.ahead
    total = len(sound) / 16_000
    print(f"{total:.0f} s; whole: WER {100 * jiwer.wer(said, whole):.1f} %, {seconds:.1f} s")
    errors = 100 * jiwer.wer(said, " ".join(heard))
    print(f"listening: WER {errors:.1f} %, computing {100 * busy / total:.0f} % of the time")
    for name, delays in (("shown", shown), ("settled", settled), ("ended", ended)):
        p50, p95 = np.percentile(delays, [50, 95])
        print(f"{name}: median {p50:.2f}, 95 % within {p95:.2f} s")
    print(f"changed: {100 * changed / max(1, count):.1f} % of {count} settled words")


def places(words: list[str], i: int, word: str) -> list[int]:
    """Where `word` occurs in `words`, near its place `i`."""
    return [j for j in range(max(0, i - OFF), min(len(words), i + OFF + 1)) if words[j] == word]


if __name__ == "__main__":
    main()
