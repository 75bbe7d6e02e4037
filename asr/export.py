"""Exports a model for programs without PyTorch: `python -m asr.export exp/onnx` writes ONNX graphs (docs/onnx.md).

Exit code 2 if the model cannot be exported, 1 if the graphs do not compute what the model does.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from asr.commands import fail, guarded, load_model, say


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="asr-export", description="Writes a model as ONNX graphs.")
    parser.add_argument("out", type=Path, help="the folder to write, new or empty")
    parser.add_argument("--model", help="model folder, or whisper:PATH (default: the model that ships)")
    parser.add_argument("--int8", action="store_true", help="integer arithmetic: smaller and faster, less exact")
    return parser


@guarded("asr.export")
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    from asr.decode.onnx import ExportError, check_export, export_onnx

    check_export(args.out)
    recognizer = load_model(args.model, "cpu", precision="float32", language_model=None)
    try:
        difference = export_onnx(recognizer, args.out, args.int8)
    except ExportError as error:
        fail("asr.export", error, code=1)
    say(f"{args.out}: log-posteriors are the model's to {difference:.0e}\n")


if __name__ == "__main__":
    main()
