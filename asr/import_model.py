"""Converts Whisper and Speech2Text checkpoints to model folders: `python -m asr.import_model whisper.pt exp/whisper`.

The reverse: `--export` writes an imported (or fine-tuned) model folder as a Hugging Face folder. Exit code 2 for a
source that cannot be read.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from asr.commands import check_no_model, guarded, keep_inputs, say
from asr.model.config import WEIGHT_TYPES


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asr-import-model", description="Converts other toolkits' checkpoints into model folders."
    )
    parser.add_argument(
        "source", help="OpenAI's .pt file of Whisper, or a Hugging Face folder of Whisper or Speech2Text"
    )
    parser.add_argument("out", help="the model folder to write")
    parser.add_argument("--vocabulary", help="Whisper's .tiktoken file or vocab.json (default: next to the weights)")
    parser.add_argument(
        "--language",
        default="en",
        help="language that Whisper is told to expect, or that Speech2Text writes (default: en)",
    )
    parser.add_argument("--task", default="transcribe", help="transcribe, or translate into English")
    parser.add_argument("--timestamps", action="store_true", help="let Whisper write times, which become segments")
    parser.add_argument(
        "--window",
        type=float,
        default=30.0,
        help="seconds that Whisper's input is padded to; less is faster (default: 30)",
    )
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=WEIGHT_TYPES,
        help="type of the weights on disk (default: float32)",
    )
    parser.add_argument("--export", action="store_true", help="the reverse: a model folder to a Hugging Face folder")
    return parser


@guarded("asr.import_model")
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    keep_inputs([args.source, *([args.vocabulary] if args.vocabulary else [])], Path(args.out))
    check_no_model(Path(args.out))
    for name in ("vocabulary", "language", "task", "timestamps", "window", "dtype"):
        if args.export and getattr(args, name) != parser().get_default(name):
            raise ValueError(f"--{name} has no effect on --export: leave it out")
    from asr.decode.options import IMPORTED
    from asr.decode.tuning import save_tuning
    from asr.model.foreign import WhisperTask, export_model, import_model
    from asr.model.speech_model import SpeechModel

    if args.export:
        export_model(SpeechModel.load(args.source), args.out)
        say(f"{args.out}: a checkpoint for transformers\n")
        return
    wanted = WhisperTask(args.language, args.task, args.timestamps, args.window)
    model = import_model(args.source, args.vocabulary, wanted)
    model.save(args.out, args.dtype)
    save_tuning(args.out, IMPORTED)
    say(f"{args.out}: a model for asr, in {args.dtype}\n")


if __name__ == "__main__":
    main()
