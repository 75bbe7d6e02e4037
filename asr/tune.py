"""Tunes the decoding of a model on a dev set: `python -m asr.tune dev.jsonl --model exp/a/model --ctc-weights .2 .4`.

Every combination of the weights is scored; a table shows WER and time. The word confidences are calibrated on the
transcripts of the best combination. With --write both are stored in the model folder, where transcribe and evaluate
find them, and so are the language model of --lm, --precision int8 and --piece-seconds.
"""

from __future__ import annotations

import argparse
import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from asr.commands import add_corpus, add_decoding_options, check_outputs, guarded, load_recognizer, say

if TYPE_CHECKING:
    from lhotse import CutSet

    from asr.decode.confidence import Calibration
    from asr.decode.corpora import Transcribed
    from asr.decode.options import DecodeOptions
    from asr.decode.recognizer import Recognizer

AXES = {
    "ctc_weight": "--ctc-weights",
    "lm_weight": "--lm-weights",
    "ilm_weight": "--ilm-weights",
    "ngram_weight": "--ngram-weights",
    "length_bonus": "--length-bonuses",
}
MODELS = {"lm_weight": "--lm", "ilm_weight": "--lm", "ngram_weight": "--ngram"}  # what an axis needs to have an effect

USELESS = {"greedy": tuple(AXES), "ctc": ("ctc_weight", "ilm_weight")}  # axes without effect on a strategy


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="asr-tune", description="Chooses the decoding weights on a dev set.")
    add_corpus(parser)
    for name, flag in AXES.items():
        help = "values to try (default: the model's)"
        parser.add_argument(flag, dest=f"{name}s", type=float, nargs="+", metavar="WEIGHT", help=help)
    parser.add_argument(
        "--write",
        action="store_true",
        help="store the best weights, the calibration and what else was given in the model folder",
    )
    add_decoding_options(parser)
    return parser


@guarded("asr.tune")
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    tried = {name: getattr(args, f"{name}s") or [] for name in AXES}
    for name, values in tried.items():
        if values and getattr(args, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} would have no effect: {AXES[name]} are tried")
    if args.write and not args.model:
        raise ValueError("--write needs --model: the model that ships is not changed")
    from asr.corpus import open_corpus
    from asr.decode.recognizer import FOREIGN
    from asr.decode.tuning import TUNING, load_tuning, save_tuning

    if args.write and args.model.startswith(FOREIGN):
        raise ValueError("--write needs a model folder: import the checkpoint first (asr.import_model)")
    recognizer = load_recognizer(args)
    if args.write:
        check_outputs(Path(args.model) / TUNING)
    there = {"--lm": recognizer.language_model, "--ngram": recognizer.ngram}
    for name, of in MODELS.items():
        if any(tried[name]) and there[of] is None:
            raise ValueError(f"{AXES[name]} needs another model: give one with {of}")
    strategy = recognizer.options.strategy
    best_path = strategy == "ctc" and recognizer.options.beam_size == 1
    for name in AXES if best_path else USELESS.get(strategy, ()):
        if len(tried[name]) > 1 or any(tried[name]):
            said = f"--strategy {strategy}{' with a beam of 1' if best_path else ''}"
            raise ValueError(f"{AXES[name]} have no effect on {said}")
    cuts = open_corpus(args.corpus)
    axes = {name: values or [getattr(recognizer.options, name)] for name, values in tried.items()}
    options, scored = best_options(recognizer, cuts, axes)
    found = calibrate(scored)
    if args.write:
        save_tuning(
            args.model,
            replace(options, phrases=()),
            found and found.calibration,
            args.lm if options.lm_weight else None,
            recognizer.int8,
            args.piece_seconds or load_tuning(args.model).piece_seconds,
        )
    if found:
        said = f"expected calibration error of the words' confidences: {found.before:.3f}, calibrated {found.after:.3f}"
    else:
        said = "too little was heard to calibrate the confidences on"
    say(f"{said}\n")
    if args.write:
        say(f"written to {args.model}\n")


def best_options(
    recognizer: Recognizer, cuts: CutSet, axes: dict[str, list[float]]
) -> tuple[DecodeOptions, Transcribed]:
    """Prints a table of all combinations of `axes` (fields of DecodeOptions to their values); returns the one with the
    lowest WER, for one hypothesis, and the transcripts it gave.

    Without a language model nothing is subtracted: an `lm_weight` of 0 is only combined with an `ilm_weight` of 0.
    Raises ValueError, before decoding anything, for options that the model does not support."""
    from asr.decode.corpora import transcribe_cuts
    from asr.decode.scoring import word_errors
    from asr.decode.search import check_options

    start, least, best = replace(recognizer.options, nbest=1), math.inf, None
    combined = [replace(start, **dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]
    combined = dict.fromkeys(each if each.lm_weight else replace(each, ilm_weight=0.0) for each in combined)
    for options in combined:
        check_options(recognizer.model.transformer, options, recognizer.language_model)
    say(f"| {' | '.join(axes)} | WER % | seconds |\n|{' --- |' * (len(axes) + 2)}\n")
    for options in combined:
        recognizer.options = options
        scored = transcribe_cuts(recognizer, cuts)
        wer = word_errors(scored.references, scored.hypotheses).rate
        if wer < least:
            least, best = wer, (options, scored)
        values = " | ".join(f"{getattr(options, name):g}" for name in axes)
        say(f"| {values} | {wer:.2f} | {scored.seconds:.1f} |\n")
    return best


class Calibrated(NamedTuple):
    """A calibration, and the expected calibration error without and with it."""

    calibration: Calibration
    before: float
    after: float


def calibrate(scored: Transcribed) -> Calibrated | None:
    """A calibration fitted on a recogniser's transcripts; None if they have too few words.

    Every other utterance is used for fitting, the rest to compute the errors."""
    from asr.decode.confidence import Calibration, expected_calibration_error, word_confidences
    from asr.decode.scoring import right_words
    from asr.text.words import split_words

    halves: list[tuple[list, list]] = [([], []), ([], [])]
    rows = zip(scored.references, scored.hypotheses, scored.transcripts, strict=True)
    for i, (said, heard, transcript) in enumerate(rows):
        words = [word for segment in transcript.segments for word in segment.words]
        said, heard = (" ".join(split_words(text)) for text in (said, heard))
        parts = [len(split_words(word.text)) for word in words]
        if sum(parts) != len(heard.split()):
            continue  # the normaliser joined or split words, so the scores cannot be assigned to them
        scores, right = halves[i % 2]
        scores += [word.token_scores for word in words]
        alike = iter(right_words(said, heard))
        right += [all(list(itertools.islice(alike, count))) for count in parts]
    (scores, right), (other_scores, other_right) = halves
    if not right or not other_right:
        return None
    calibration = Calibration.fit(scores, right)
    errors = (expected_calibration_error(word_confidences(other_scores, c), other_right) for c in (None, calibration))
    return Calibrated(calibration, *errors)


if __name__ == "__main__":
    main()
