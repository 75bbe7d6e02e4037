"""Scores a model on transcribed corpora: `python -m asr.evaluate CORPUS`.

Prints WER (with its 95 % confidence interval) and CER with their substitutions, deletions and insertions, and the share
of utterances with any error (SER). Both sides are normalised alike, by the model's normaliser or by `--normalizer` (to
compare models that write differently). With several corpora, the WER of each is printed, too.
Under torchrun, the processes share the corpora: `torchrun --nproc-per-node 8 -m asr.evaluate CORPUS`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from asr.commands import (
    add_corpus,
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

    from asr.decode.recognizer import Recognizer
    from asr.text.normalizer import Normalizer


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="asr-evaluate", description="Word and character error rates on corpora.")
    add_corpus(parser)
    parser.add_argument(
        "--out", type=Path, help="JSONL to write: id, reference, hypothesis and score of each utterance"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    parser.add_argument("--normalizer", help=f"for both sides: {', '.join(NORMALIZERS)} (default: the model's)")
    add_decoding_options(parser)
    return parser


@guarded("asr.evaluate")
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    keep_inputs(args.corpus, args.out)
    from asr.corpus import Skipped, open_corpus

    check_outputs(args.out)
    normalize = get_normalizer(args.normalizer) if args.normalizer else None
    recognizer = load_recognizer(args)
    told = [Skipped(corpus) for corpus in args.corpus]
    corpora = [open_corpus(corpus, skipped=each) for corpus, each in zip(args.corpus, told, strict=True)]
    for each in told:
        each.report()
    figures = evaluate(recognizer, corpora, args.out, normalize, sum(each.count for each in told))
    if figures is None:
        return
    if args.json:
        each = [{"corpus": corpus, **part} for corpus, part in zip(args.corpus, figures["corpora"], strict=True)]
        say(json.dumps({**figures, "corpora": each}) + "\n")
        return
    for corpus, errors in zip(args.corpus, figures["corpora"], strict=True):
        if len(args.corpus) > 1:
            say(f"{corpus}: {_rate('WER', errors, 'words')}\n")
    for name, unit in (("WER", "words"), ("CER", "characters")):
        say(f"{_rate(name, figures[unit], unit)}\n")
    say(f"SER {figures['sentences']:.2f} % (of the utterances something is wrong)\n")
    seconds, took = figures["seconds"], figures["decoding_seconds"]
    speed = f"{took:.1f} s"
    if recognizer.takes == "sound":
        speed = f"{seconds:.0f} s of audio in {speed}, {seconds / took:.0f} x real time"
    left_out = f" ({figures['left_out']} more were left out)" if figures["left_out"] else ""
    say(f"{figures['utterances']} utterances{left_out}, {speed}\n")


def _rate(name: str, figures: dict, unit: str) -> str:
    errors = f"{figures['substitutions']} substitutions, {figures['deletions']} deletions"
    bounds = ", {:.1f} to {:.1f}".format(*figures["interval"]) if "interval" in figures else ""
    counts = f"{errors}, {figures['insertions']} insertions in {figures['total']} {unit}"
    return f"{name} {figures['rate']:.2f} %{bounds} ({counts})"


def evaluate(
    recognizer: Recognizer, corpora: list[CutSet], out: Path | None, normalize: Normalizer | None, left_out: int
) -> dict | None:
    """Transcribes the corpora together and scores them, the words of each corpus, too; writes the hypotheses to `out`
    (JSONL). Rates are in percent; `left_out` utterances were left out before.

    With several processes, only the first returns the figures, the others None. Raises ValueError as `transcribe_cuts`
    does."""
    from asr.corpus import together
    from asr.decode.corpora import rank_and_world, seconds_of, transcribe_together
    from asr.decode.scoring import character_errors, sentence_error_rate

    cuts = together(corpora)
    rank, world = rank_and_world()  # the first shows the progress of its share
    with progress_bar(0.0 if rank else sum(seconds_of(recognizer, cut) for cut in list(cuts)[::world])) as advance:
        done = transcribe_together(recognizer, cuts, advance, normalize)
    if done is None:
        return None
    if out:
        with open(out, "w", encoding="utf-8", errors="backslashreplace") as file:  # valid escapes in JSON, too
            for cut, said, heard, transcript in zip(
                done.cuts, done.references, done.hypotheses, done.transcripts, strict=True
            ):
                score = sum(segment.score for segment in transcript.segments)
                row = {"id": cut.id, "reference": said, "hypothesis": heard, "score": score}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    characters = character_errors(done.references, done.hypotheses)
    pairs = list(zip(done.references, done.hypotheses, strict=True))
    ids = iter([cut.id for cut in cuts])
    members = [set(islice(ids, len(corpus))) for corpus in corpora]
    named = [(cut.id, pair) for cut, pair in zip(done.cuts, pairs, strict=True)]
    each = [_word_figures([pair for name, pair in named if name in of_one]) for of_one in members]
    return {
        "words": _word_figures(pairs) if len(each) > 1 else each[0],
        "corpora": each,
        "characters": {"rate": characters.rate, **dataclasses.asdict(characters)},
        "sentences": sentence_error_rate(done.references, done.hypotheses),
        "utterances": len(done.cuts),
        "left_out": left_out + len(cuts) - len(done.cuts),
        "seconds": sum(cut.duration for cut in done.cuts),
        "decoding_seconds": done.seconds,
    }


def _word_figures(pairs: list[tuple[str, str]]) -> dict:
    from asr.decode.scoring import wer_interval, word_errors

    references, hypotheses = zip(*pairs, strict=True) if pairs else ((), ())
    errors = word_errors(references, hypotheses)
    return {"rate": errors.rate, "interval": wer_interval(references, hypotheses), **dataclasses.asdict(errors)}


if __name__ == "__main__":
    main()
