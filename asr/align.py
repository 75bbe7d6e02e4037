"""When each word of a transcribed corpus is said: `python -m asr.align CORPUS --out CUTS` writes Lhotse cuts with the
words' times (`supervision.alignment["word"]`), found by CTC; `--ctm` writes them as NIST's CTM, too.

Exit code 2 for a wrong option, model or corpus.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from asr.commands import check_outputs, cuts_path, first_repeated, guarded, keep_inputs, load_model, progress_bar, say
from asr.formats import ctm_line, ctm_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from lhotse import CutSet, MonoCut

    from asr.decode import Recognizer


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="asr-align", description="Times of the words of a transcribed corpus.")
    parser.add_argument("corpus", nargs="+", help="manifest (.jsonl), tar, cuts (.jsonl.gz), AN4 list, folder")
    parser.add_argument("--out", type=cuts_path, required=True, help="cuts to write (.jsonl.gz)")
    parser.add_argument("--ctm", type=Path, help="file for the same times as CTM: utterance, 1, start, duration, word")
    parser.add_argument("--model", help="model folder with CTC (default: the model that ships)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: a GPU where there is one)")
    parser.add_argument("--batch-seconds", type=float, default=120.0, help="seconds aligned at once (default: 120)")
    return parser


@guarded("asr.align")
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    keep_inputs(args.corpus, args.out, args.ctm)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    from asr.corpus import open_corpus, write_cuts

    check_outputs(args.out, args.ctm)
    recognizer = load_model(args.model, args.device, language_model=None, batch_seconds=args.batch_seconds)
    cuts = open_corpus(args.corpus)
    if args.ctm and (twice := first_repeated(ctm_name(cut.id) for cut in cuts)):
        raise ValueError(f"--ctm: several of the utterances would be called {twice}")
    with progress_bar(sum(cut.duration for cut in cuts)) as advance:
        aligned = align_cuts(recognizer, cuts, advance)
    write_cuts(aligned, args.out)
    words = [(cut.id, word) for cut in aligned for word in cut.supervisions[0].alignment["word"]]
    if args.ctm:
        lines = (ctm_line(name, word.start, word.end, word.symbol) for name, word in words)
        args.ctm.write_text("".join(lines), encoding="utf-8")
    say(f"{args.out}: {len(aligned)} utterances, {len(words)} words\n")


def align_cuts(recognizer: Recognizer, cuts: CutSet, progress: Callable[[float], None] | None = None) -> CutSet:
    """The cuts with the times of their words, which the model's normaliser has normalised. What cannot be read, is
    silent, has no transcript or is too short for it is reported by name and left out. `progress` is told the seconds
    done.

    Raises ValueError where the model cannot take what was read or has no CTC, or nothing could be aligned."""
    from lhotse import CutSet
    from lhotse.supervision import AlignmentItem

    from asr.corpus import Skipped

    skipped, aligned = Skipped("aligning"), set()
    skipped.total = len(cuts)
    for batch in _batches(recognizer, cuts):
        texts = [recognizer.model.normalize(cut.supervisions[0].text or "") for cut, _ in batch]
        for (cut, _), words in zip(batch, recognizer.align([sound for _, sound in batch], texts), strict=True):
            if not words:
                skipped.add(cut.id, "silent, or too short for its transcript" if words is None else "no transcript")
                continue
            items = [AlignmentItem(word.text, word.start, word.end - word.start) for word in words]
            cut.supervisions[0].alignment = {"word": items}
            aligned.add(cut.id)
        if progress:
            progress(sum(cut.duration for cut, _ in batch))
    skipped.report()
    if not aligned:
        raise ValueError("no utterance could be aligned")
    return CutSet.from_cuts(cut for cut in cuts if cut.id in aligned).to_eager()


def _batches(recognizer: Recognizer, cuts: CutSet) -> Iterator[list[tuple[MonoCut, np.ndarray]]]:
    """The cuts with their sound, those of about the same length together."""
    from asr.decode.scoring import iterate_for

    batch: list[tuple[MonoCut, np.ndarray]] = []
    for cut, sound in iterate_for(recognizer, sorted(cuts, key=lambda cut: cut.duration)):
        if batch and (len(batch) + 1) * cut.duration > recognizer.batch_seconds:
            yield batch
            batch = []
        batch.append((cut, sound))
    if batch:
        yield batch


if __name__ == "__main__":
    main()
