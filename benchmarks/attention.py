"""Time and memory of the encoder against the length of a recording, with full attention and with a window.

    python benchmarks/attention.py [--seconds 10 60 600 3600] [--left 64] [--right 64] [--out docs/attention.png]
    python benchmarks/attention.py --training --seconds 10 60 120 300

Runs the encoder of the model that ships (random weights, float32) on one recording in one piece, each measurement in a
process of its own (Linux): the time of a pass (in training: with the gradients), and by how much its resident set grew
meanwhile.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from rows import measured

KINDS = ("full", "local")


def measure(seconds: float, window: tuple[int, int] | None, training: bool) -> tuple[float, float]:
    """The seconds and the MiB that a pass needs."""
    import time
    from dataclasses import replace

    import torch

    import asr
    from asr.model.encoder import Encoder

    config = asr.load().model.transformer.config
    left, right = window or (None, None)
    encoder = Encoder(replace(config, attention_left=left, attention_right=right)).train(training)
    frames = round(seconds * 100)
    X, lens = torch.randn(1, frames, config.input_dim), torch.tensor([frames])

    def step(X: torch.Tensor, lens: torch.Tensor) -> None:
        with torch.set_grad_enabled(training):
            memory, _ = encoder(X, lens)
            if training:
                memory.square().mean().backward()

    step(X[:, :1000], lens.clamp(max=1000))  # compiles the kernels
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, started = peak(), time.perf_counter()
    step(X, lens)
    return time.perf_counter() - started, peak() - before


def peak() -> float:
    """The largest resident set so far, in MiB."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


def measure_apart(seconds: float, kind: str, args: argparse.Namespace) -> tuple[float, float] | str:
    """Runs `measure` in a process of its own; returns the last line of its errors if it fails."""
    options = ["--left", str(args.left), "--right", str(args.right), *(["--training"] if args.training else [])]
    return measured([__file__, "--measure", kind, "--seconds", str(seconds), *options], args.threads)


def draw(rows: list[tuple[float, dict[str, tuple[float, float]]]], out: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    minutes = [seconds / 60 for seconds, _ in rows]
    for i, title in enumerate(("seconds for a pass", "MiB for a pass")):
        axes = figure.add_subplot(1, 2, i + 1, title=title, xlabel="minutes of audio", xscale="log", yscale="log")
        for kind in KINDS:
            axes.plot(minutes, [values[kind][i] for _, values in rows], marker="o", label=f"{kind} attention")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(out, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, nargs="+", default=[10, 60, 300, 600, 1800, 3600])
    parser.add_argument("--left", type=int, default=64, help="frames before a frame (80 ms each)")
    parser.add_argument("--right", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--training", action="store_true", help="a training step instead of a pass")
    parser.add_argument("--out", type=Path, help="picture to write")
    parser.add_argument("--measure", choices=KINDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        window = (args.left, args.right) if args.measure == "local" else None
        print(json.dumps(measure(args.seconds[0], window, args.training)))
        return
    print("| sound | full: time, memory | local: time, memory | full / local |\n| --- | --- | --- | --- |")
    rows = []
    for seconds in args.seconds:
        values = {kind: measure_apart(seconds, kind, args) for kind in KINDS}
        failed = {kind: value for kind, value in values.items() if isinstance(value, str)}
        if failed:
            print(f"| {seconds:g} s | " + " | ".join(failed.get(kind, "") for kind in KINDS) + " | |")
            continue
        rows.append((seconds, values))
        (full, full_mib), (local, local_mib) = (values[kind] for kind in KINDS)
        ratio = f"{full / local:.1f} x, {full_mib / max(1, local_mib):.1f} x"
        print(f"| {seconds:g} s | {full:.2f} s, {full_mib:.0f} MiB | {local:.2f} s, {local_mib:.0f} MiB | {ratio} |")
    if args.out:
        draw(rows, args.out)


if __name__ == "__main__":
    main()
