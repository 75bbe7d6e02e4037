"""Scoring a model on a transcribed corpus: `python -m asr.evaluate MANIFEST`.

WER (and between which bounds it lies with 95 % confidence) and CER with their substitutions, deletions and insertions,
and how many utterances are not wholly right (SER), both sides normalised alike, by the model's normaliser or by
`--normalizer` (to compare models that write differently).
Under torchrun the processes share the corpus: `torchrun --nproc-per-node 8 -m asr.evaluate MANIFEST`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from asr.commands import (
    add_decoding_options,
    check_outputs,
    guarded,
    keep_inputs,
    load_recognizer,
    progress_bar,
    say,
)
from asr.text.normalizer import NORMALIZERS, get_normalizer

if TYPE_CHECKING:
    from lhotse import CutSet

    from asr.decode import Recognizer
    from asr.text.normalizer import Normalizer


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="asr-evaluate", description="Word and character error rate on a corpus.")
    parser.add_argument("corpus", nargs="+", help="manifest (.jsonl), tar, cuts (.jsonl.gz), AN4 list, folder")
    parser.add_argument("--out", type=Path, help="JSONL to write: id, reference, hypothesis, score of each utterance")
    parser.add_argument("--json", action="store_true", help="the figures as one JSON object")
    parser.add_argument("--normalizer", help=f"of both sides: {', '.join(NORMALIZERS)} (default: the model's)")
    add_decoding_options(parser)
    return parser


@guarded("asr.evaluate")
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    keep_inputs(args.corpus, args.out)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    from asr.corpus import open_corpus

    check_outputs(args.out)
    normalize = get_normalizer(args.normalizer) if args.normalizer else None
    recognizer = load_recognizer(args)
    figures = evaluate(recognizer, open_corpus(args.corpus), args.out, normalize)
    if figures is None:
        return
    if args.json:
        say(json.dumps(figures) + "\n")
        return
    for name, unit in (("WER", "words"), ("CER", "characters")):
        f = figures[unit]
        errors = f"{f['substitutions']} substitutions, {f['deletions']} deletions, {f['insertions']} insertions"
        bounds = ", {:.1f} to {:.1f}".format(*f["interval"]) if "interval" in f else ""
        say(f"{name} {f['rate']:.2f} %{bounds} ({errors} in {f['total']} {unit})\n")
    say(f"SER {figures['sentences']:.2f} % (of the utterances something is wrong)\n")
    seconds, took = figures["seconds"], figures["decoding_seconds"]
    speed = f"{took:.1f} s"
    if recognizer.takes == "sound":
        speed = f"{seconds:.0f} s of sound in {speed}, {seconds / took:.0f} x real time"
    left_out = f" ({figures['left_out']} more could not be read)" if figures["left_out"] else ""
    say(f"{figures['utterances']} utterances{left_out}, {speed}\n")


def evaluate(
    recognizer: Recognizer, cuts: CutSet, out: Path | None = None, normalize: Normalizer | None = None
) -> dict | None:
    """Transcribes the cuts and scores them; writes what was heard to `out` (JSONL). Rates are in percent.

    Of several processes the first has the figures, the others None. Raises ValueError as `transcribe_cuts` does."""
    from asr.decode.corpora import rank_and_world, transcribe_together
    from asr.decode.scoring import character_errors, sentence_error_rate, wer_interval, word_errors

    rank, world = rank_and_world()  # the first shows how far it is with its share
    with progress_bar(0.0 if rank else sum(cut.duration for cut in list(cuts)[::world])) as advance:
        done = transcribe_together(recognizer, cuts, advance, normalize)
    if done is None:
        return None
    if out:
        with open(out, "w", encoding="utf-8", errors="backslashreplace") as file:  # JSON reads that, too
            for cut, said, heard, transcript in zip(
                done.cuts, done.references, done.hypotheses, done.transcripts, strict=True
            ):
                score = sum(segment.score for segment in transcript.segments)
                row = {"id": cut.id, "reference": said, "hypothesis": heard, "score": score}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    words = word_errors(done.references, done.hypotheses)
    characters = character_errors(done.references, done.hypotheses)
    return {
        "words": {
            "rate": words.rate,
            "interval": wer_interval(done.references, done.hypotheses),
            **dataclasses.asdict(words),
        },
        "characters": {"rate": characters.rate, **dataclasses.asdict(characters)},
        "sentences": sentence_error_rate(done.references, done.hypotheses),
        "utterances": len(done.cuts),
        "left_out": len(cuts) - len(done.cuts),
        "seconds": sum(cut.duration for cut in done.cuts),
        "decoding_seconds": done.seconds,
    }


if __name__ == "__main__":
    main()
