"""Finds the word times of a transcribed corpus by CTC: `python -m asr.align CORPUS --out CUTS` writes Lhotse cuts with
the times (`supervision.alignment["word"]`); `--ctm` also writes them as NIST's CTM.

Exit code 2 for a wrong option, model or corpus.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from asr.commands import (
    add_corpus,
    check_outputs,
    cuts_path,
    first_repeated,
    guarded,
    keep_inputs,
    load_model,
    progress_bar,
    say,
)
from asr.formats import ctm_line, ctm_name


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asr-align", description="Finds the times of the words of a transcribed corpus."
    )
    add_corpus(parser)
    parser.add_argument("--out", type=cuts_path, required=True, help="cuts to write (.jsonl.gz)")
    parser.add_argument("--ctm", type=Path, help="also write the times as CTM: utterance, 1, start, duration, word")
    parser.add_argument("--model", help="model folder with CTC (default: the model that ships)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    parser.add_argument(
        "--batch-seconds", type=float, default=120.0, help="seconds of audio aligned at once (default: 120)"
    )
    return parser


@guarded("asr.align")
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    keep_inputs(args.corpus, args.out, args.ctm)
    from asr.corpus import open_corpus, write_cuts
    from asr.decode.corpora import align_cuts, seconds_of

    check_outputs(args.out, args.ctm)
    recognizer = load_model(args.model, args.device, language_model=None, batch_seconds=args.batch_seconds)
    cuts = open_corpus(args.corpus)
    if args.ctm and (twice := first_repeated(ctm_name(cut.id) for cut in cuts)):
        raise ValueError(f"--ctm: several utterances would be called {twice}")
    with progress_bar(sum(seconds_of(recognizer, cut) for cut in cuts)) as advance:
        aligned = align_cuts(recognizer, cuts, advance)
    aligned = write_cuts(aligned, args.out)
    words = [(cut.id, word) for cut in aligned for word in cut.supervisions[0].alignment["word"]]
    if args.ctm:
        lines = (ctm_line(name, word.start, word.end, word.symbol) for name, word in words)
        args.ctm.write_text("".join(lines), encoding="utf-8")
    say(f"{args.out}: {len(aligned)} utterances, {len(words)} words\n")


if __name__ == "__main__":
    main()
