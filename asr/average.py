"""Averages the weights of several models: `python -m asr.average exp/a/model exp/b/model --out exp/mean`.

The models should have been trained from the same one: their mean usually makes fewer errors than each of them, and is
as fast as one. Its decoding has to be tuned again (asr.tune). A single model is copied, with weights of another type
(`--dtype`) and everything that was tuned. Exit code 2 for models that do not match.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from asr.commands import check_no_model, guarded, keep_inputs, say
from asr.heap import importing
from asr.model.config import WEIGHT_TYPES


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asr-average", description="Averages the weights of models that were trained from the same one."
    )
    parser.add_argument(
        "models", nargs="+", help="model folders; tokenizer, normaliser and bigram are taken from the first"
    )
    parser.add_argument("--out", required=True, type=Path, help="the model folder to write")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=WEIGHT_TYPES,
        help="type of the weights on disk (default: float32)",
    )
    return parser


@guarded("asr.average")
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    keep_inputs(args.models, args.out)
    check_no_model(args.out)
    with importing():
        from asr.decode.tuning import LANGUAGE_MODEL, TUNING
        from asr.model.averaging import average_models

    average_models(args.models).save(args.out, args.dtype)
    if len(args.models) == 1:
        only = Path(args.models[0])
        if (only / TUNING).is_file():
            shutil.copy(only / TUNING, args.out)
        if (only / LANGUAGE_MODEL).is_dir():
            shutil.copytree(only / LANGUAGE_MODEL, args.out / LANGUAGE_MODEL)
    made = f"the mean of {len(args.models)} models" if len(args.models) > 1 else "a copy"
    say(f"{args.out}: {made}, in {args.dtype}\n")


if __name__ == "__main__":
    main()
