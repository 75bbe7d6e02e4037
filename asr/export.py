"""A model for programs without PyTorch: `python -m asr.export exp/onnx` writes it as ONNX graphs (docs/onnx.md).

Exit code 2 for what cannot be exported, 1 where the graphs do not compute what the model does.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from asr.commands import check_no_model, fail, guarded, keep_inputs, load_model, say


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="asr-export", description="Writes a model as ONNX graphs.")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--model", help="model folder, or whisper:PATH (default: the model that ships)")
    parser.add_argument("--int8", action="store_true", help="weights in whole numbers: smaller and quicker")
    return parser


@guarded("asr.export")
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    keep_inputs([args.model] if args.model else [], args.out)
    check_no_model(args.out)
    from asr.decode.onnx import FILES, ExportError, export_onnx

    if there := [name for name in FILES if (args.out / name).exists()]:
        raise ValueError(f"{args.out} holds {there[0]} already: move it away, or take another folder")
    recognizer = load_model(args.model, "cpu", precision="float32", language_model=None)
    try:
        difference = export_onnx(recognizer, args.out, args.int8)
    except ExportError as error:
        fail("asr.export", error, code=1)
    say(f"{args.out}: log-posteriors are the model's to {difference:.0e}\n")


if __name__ == "__main__":
    main()
