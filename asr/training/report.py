"""The summary page of a training: what TensorBoard holds, drawn into a single self-contained HTML file."""

from __future__ import annotations

import html
import io
import json
import logging
from pathlib import Path
from typing import Any

PARTS = "ctc", "attention", "consistency", "word_errors", "masked"
PANELS = (  # title, curves
    ("loss", ("train/total_epoch", "dev/loss")),
    ("parts of the loss", tuple(f"train/{part}_epoch" for part in PARTS)),
    ("dev WER (%)", ("dev/wer",)),
    ("accuracy on dev (% of the codes)", ("dev/accuracy",)),
    ("learning rate", ("lr/pg1",)),
    ("norm of the gradient", ("train/gradient_norm",)),
    ("seconds of audio per second", ("train/sound_a_second",)),
    ("padding (% of the frames), waiting for data (% of the time)", ("train/padding", "train/waiting")),
)

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em }}
svg {{ max-width: 100%; height: auto }} pre {{ overflow-x: auto }}</style></head>
<body><h1>{title}</h1>
<p>{summary}</p>
{plots}
{samples}
<h2>Settings</h2>
<pre>{settings}</pre>
</body></html>
"""


def write_report(out: Path, summary: str, settings: dict[str, Any]) -> None:
    """Writes `out`/report.html from `out`/tensorboard; `summary` is a sentence on how the training ended."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # heavy: only at the end

    logging.getLogger("tensorboard").setLevel(logging.WARNING)  # it logs each file that it opens
    board = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    board.Reload()
    tags = board.Tags()
    panels = []
    for title, names in PANELS:
        curves = {name: board.Scalars(name) for name in names if name in tags["scalars"]}
        if curves:
            panels.append((title, curves))
    samples = ""
    if "dev/transcripts/text_summary" in tags["tensors"]:
        said = board.Tensors("dev/transcripts/text_summary")[-1].tensor_proto.string_val[0].decode()
        lines = html.escape(said).replace("**said**", "<b>said</b>").replace("**heard**", "<br><b>heard</b>")
        samples = "<h2>Transcripts of the last validation</h2>\n"
        samples += "".join(f"<p>{line}</p>\n" for line in lines.split("\n\n"))
    page = PAGE.format(
        title=html.escape(out.name),
        summary=html.escape(summary),
        plots=_plots(panels),
        samples=samples,
        settings=html.escape(json.dumps(settings, indent=1, ensure_ascii=False)),
    )
    (out / "report.html").write_text(page, encoding="utf-8")


def _plots(panels: list[tuple[str, dict[str, list]]]) -> str:
    """One SVG of all panels, two in a row, plotted over the updates."""
    from matplotlib.figure import Figure

    rows = max(1, -(-len(panels) // 2))
    width, height = 11, 3.2 * rows
    figure = Figure(figsize=(width, height))
    figure.subplots_adjust(left=0.07, right=0.98, bottom=0.5 / height, top=1 - 0.4 / height, wspace=0.18, hspace=0.42)
    for i, (title, curves) in enumerate(panels):
        axes = figure.add_subplot(rows, 2, i + 1, title=title, xlabel="update")
        for name, points in curves.items():
            axes.plot([p.step for p in points], [p.value for p in points], label=name, linewidth=1.2)
        axes.grid(alpha=0.3)
        if len(curves) > 1:
            axes.legend()
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    svg = drawn.getvalue()
    return svg[svg.index("<svg") :]
