"""Shows the inside of a model: `python -m asr.inspect FILE --out page.html` transcribes a recording and writes a page
with the features, the CTC posteriors, and the attention of every layer and head. `docs/inside.md` explains it.

Exit code 2 for a wrong option or model, 1 for a recording that cannot be read.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING

from asr.commands import add_decoding_options, check_outputs, fail, guarded, keep_inputs, load_recognizer, say

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from asr.decode.observation import Observation

PIXELS = re.compile('href="(data:image/png[^"]*)"')  # of a picture in an SVG by matplotlib
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 80em; margin: 2em auto; padding: 0 1em }}
img {{ max-width: 100%; height: auto; display: block }} img[hidden] {{ display: none }}
blockquote {{ font-size: 1.2em }}
</style></head>
<body><h1>{title}</h1>
<p>{summary}</p>
<blockquote>{text}</blockquote>
{sections}
<script>
for (const section of document.querySelectorAll("section[data-layers]")) {{
  const [layer, head] = section.querySelectorAll("select");
  const show = () => {{
    for (const image of section.querySelectorAll("img"))
      image.hidden = image.dataset.layer !== layer.value || image.dataset.head !== head.value;
  }};
  layer.addEventListener("change", show);
  head.addEventListener("change", show);
  show();
}}
</script>
</body></html>
"""

EXPLAINED = {
    "What was heard, and when": "The features; what CTC hears in each frame (gray: nothing new); the words, from where"
    " CTC hears their first token to where it hears their last.",
    "Cross-attention: tokens against time": "Which frames the decoder looked at before it wrote each token. A head that"
    " follows the speech is a falling line.",
    "Self-attention of the encoder": "Which frames (across) each frame (down) drew on.",
    "Every head: entropy and diagonality": "Entropy is low where a head looks at one place; diagonality is 1 where"
    " every frame looks at its own place.",
    "Scores with and without 1/√d_k": "How far the scores Q Kᵀ of a frame are spread over its keys, and how even the"
    " softmax is that they give: without the scale it would look at hardly more than one place.",
    "Positions": "What is added to the encoder's frames to tell their places.",
}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asr-inspect", description="Writes a page that shows what went on inside the model."
    )
    parser.add_argument(
        "file", metavar="FILE", help="audio, or other input of the model (for text, the first line of the file)"
    )
    parser.add_argument("--out", type=Path, default=Path("page.html"), help="page to write (default: page.html)")
    parser.add_argument("--piece", type=int, default=1, help="which piece of a long recording (default: the first)")
    add_decoding_options(parser)
    return parser


@guarded("asr.inspect")
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    keep_inputs([args.file], args.out)
    if args.piece < 1:
        raise ValueError(f"--piece must be at least 1, not {args.piece}")
    check_outputs(args.out)
    recognizer = load_recognizer(args)
    from asr.audio.reading import AudioError, read_lines
    from asr.decode.observation import observe

    try:
        recording = next(read_lines(args.file), "") if recognizer.takes == "text" else args.file
        piece = next(islice(recognizer.pieces(recording), args.piece - 1, None), None)
        if piece is None or not len(piece.samples):
            raise AudioError(f"{args.file}: there is no piece {args.piece} in it")
        observation = observe(recognizer, piece.samples)
        args.out.write_text(page(observation, args.file, piece.start), encoding="utf-8")
    except (AudioError, OSError) as error:
        fail("asr.inspect", error, code=1)
    except ValueError as error:  # more tokens than the decoder has positions for
        fail("asr.inspect", f"{args.file}: {error}", code=1)
    say(f"{args.out}: {observation.text}\n")


def page(observation: Observation, name: str, start: float = 0.0) -> str:
    """The page as self-contained HTML; `start` is where the observed piece starts in the recording, in seconds."""
    from asr import plots
    from asr.audio.reading import printable

    sections = []
    if observation.takes != "text":
        sections.append(_section("What was heard, and when", _image(plots.sound(observation))))
    for title, weights, draw in (
        ("Cross-attention: tokens against time", observation.cross_attention, plots.cross_attention),
        ("Self-attention of the encoder", observation.self_attention, plots.self_attention),
    ):
        layers, heads = weights.shape[:2]
        images = _images(partial(draw, observation), weights)
        chosen = f"<p><label>layer {_select(layers, layers)}</label> <label>head {_select(heads, 1)}</label></p>\n"
        sections.append(_section(title, chosen + "\n".join(images), f' data-layers="{layers}"'))
    sections.append(_section("Every head: entropy and diagonality", _image(plots.heads(observation))))
    sections.append(_section("Scores with and without 1/√d_k", _image(plots.spread(observation))))
    sections.append(_section("Positions", _image(plots.positions(observation))))
    end = start + observation.length
    heard = f"{start:.2f} to {end:.2f} s" if observation.takes != "text" else f"{len(observation.source)} tokens in"
    layers = f"{observation.self_attention.shape[1]} heads in {len(observation.self_attention)} encoder layers"
    decoder = f"{observation.cross_attention.shape[1]} in {len(observation.cross_attention)} decoder layers"
    return PAGE.format(
        title=html.escape(printable(Path(name).name)),
        summary=f"{heard}; {len(observation.tokens) - 1} tokens out; {layers}, {decoder}",
        text=html.escape(observation.text) or "<i>nothing was heard</i>",
        sections="\n".join(sections),
    )


def _section(title: str, content: str, attributes: str = "") -> str:
    return f"<section{attributes}><h2>{title}</h2>\n<p>{EXPLAINED[title]}</p>\n{content}</section>"


def _select(count: int, chosen: int) -> str:
    options = (f"<option{' selected' if i == chosen else ''}>{i}</option>" for i in range(1, count + 1))
    return f"<select>{''.join(options)}</select>"


def _images(draw: Callable[[int, int], Figure], weights: Tensor) -> Iterator[str]:
    """The pictures of all heads of all layers, hidden; `weights` `(L, H, ...)`. Axes and labels are drawn once: only
    the weights and the title change."""
    figure = draw(1, 1)
    (axes,) = figure.axes
    (image,) = axes.get_images()
    drawn, title = _svg(figure), axes.get_title()
    (first,) = PIXELS.findall(drawn)
    figure.set_layout_engine(None)  # what was fitted stays where it is
    axes.set_axis_off()
    axes.set_title("")
    layers, heads = (range(1, count + 1) for count in weights.shape[:2])
    for layer, head in product(layers, heads):
        image.set_data(weights[layer - 1, head - 1])
        image.autoscale()
        (pixels,) = PIXELS.findall(_svg(figure))
        own_title = title.replace("layer 1, head 1", f"layer {layer}, head {head}")
        attributes = f' data-layer="{layer}" data-head="{head}" hidden'
        yield _img(drawn.replace(first, pixels).replace(title, own_title), attributes)


def _image(figure: Figure) -> str:
    return _img(_svg(figure))


def _img(svg: str, attributes: str = "") -> str:
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt=""{attributes} src="data:image/svg+xml;base64,{data}">'


def _svg(figure: Figure) -> str:
    """An SVG whose text stays text, for the browser to draw: it has fonts for every script, matplotlib for few."""
    from matplotlib import rc_context

    drawn = io.StringIO()
    with rc_context({"svg.fonttype": "none"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        figure.savefig(drawn, format="svg", dpi=90)
    return drawn.getvalue()


if __name__ == "__main__":
    main()
