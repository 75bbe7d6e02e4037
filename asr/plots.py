"""Pictures of what went on inside a model during transcription, as matplotlib figures.

    observation = observe(asr.load(), samples)          # asr.decode.observation
    plots.cross_attention(observation, layer=3, head=1).savefig("cross.png")

Layers and heads count from 1. `asr.inspect` puts the same pictures on one page.
"""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from asr.decode.observation import Observation, diagonality, entropy, score_spread, unscaled

SPIKE = 0.3  # posterior above which a CTC spike is labelled
MOST_LABELS = 60  # most on an axis


def sound(observation: Observation) -> Figure:
    """The features over time, the CTC posteriors, and the words where they were heard."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    above, middle, below = figure.subplots(3, 1, sharex=True, height_ratios=(4, 3, 1))
    if observation.features.ndim == 2:
        title = "log-mel features, normalised" if observation.takes == "sound" else "features"
        edges = observation.frames[0], observation.frames[0] + observation.length  # close to those of the features
        _picture(above, observation.features.T, edges, len(observation.features[0]))
        above.set(title=title, ylabel="band")
    if observation.ctc is not None:
        _spikes(middle, observation)
    middle.set(ylabel="CTC posterior", ylim=(0, 1.15))
    for word in observation.words:
        below.axvspan(word.start, word.end, color="tab:blue", alpha=0.15)
        middle_of_it = (word.start + word.end) / 2
        below.text(middle_of_it, 0.5, _drawable(word.text), ha="center", va="center", fontsize=9)
    below.set(yticks=[], xlabel="seconds", xlim=(0, observation.length))
    return figure


def cross_attention(observation: Observation, layer: int, head: int) -> Figure:
    """Which encoder frames a head of the decoder looked at before it wrote each token."""
    weights = observation.cross_attention[layer - 1, head - 1]
    figure = Figure(figsize=(12, max(3.0, 0.18 * min(len(weights), MOST_LABELS))), layout="constrained")
    axes = figure.subplots()
    _picture(axes, weights, observation.frames, len(weights), downwards=True)
    every = -(-len(weights) // MOST_LABELS)
    rows = range(0, len(weights), every)
    axes.set_yticks([row + 0.5 for row in rows], [_drawable(observation.tokens[row]) for row in rows], fontsize=8)
    axes.set(title=f"cross-attention, decoder layer {layer}, head {head}", xlabel=observation.unit)
    if observation.source:
        places = [place + 0.5 for place in range(len(observation.source))]
        axes.set_xticks(places, map(_drawable, observation.source), fontsize=8, rotation=90)
    return figure


def self_attention(observation: Observation, layer: int, head: int) -> Figure:
    """Which encoder frames each encoder frame attended to."""
    weights = observation.self_attention[layer - 1, head - 1]
    figure = Figure(figsize=(5.5, 5), layout="constrained")
    axes = figure.subplots()
    _picture(axes, weights, observation.frames, observation.frames[1] - observation.frames[0], downwards=True)
    title = f"self-attention, encoder layer {layer}, head {head}"
    axes.set(title=title, xlabel=f"attended to: {observation.unit}", ylabel=f"frame: {observation.unit}")
    return figure


def heads(observation: Observation) -> Figure:
    """Entropy and diagonality of every head of the encoder's self-attention and of the decoder's cross-attention."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    columns = figure.subplots(1, 4)
    kinds = (("encoder", observation.self_attention), ("decoder, cross", observation.cross_attention))
    for i, (name, weights) in enumerate(kinds):
        most = np.log(weights.shape[-1])
        _table(columns[2 * i], entropy(weights), f"{name}: entropy (nats; even: {most:.1f})", 0, most)
        _table(columns[2 * i + 1], diagonality(weights), f"{name}: diagonality", 0, 1)
    return figure


def spread(observation: Observation) -> Figure:
    """How far the attention scores are spread over the keys, with and without 1/√d_k, and the entropy of the softmax in
    both cases."""
    figure = Figure(figsize=(12, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    d_k, weights = observation.key_dim, observation.self_attention
    scaled, raw = (x.mean(dim=1) for x in score_spread(weights, d_k))
    layers = np.arange(1, len(weights) + 1)
    for shift, values, label in ((-0.2, scaled, "with 1/√d_k"), (0.2, raw, "without")):
        left.bar(layers + shift, values, 0.4, label=label)
    left.set(title=f"deviation of the encoder's scores (d_k = {d_k})", xlabel="layer", xticks=layers)
    saturated = entropy(unscaled(weights, d_k)).mean(dim=1)
    for shift, values, label in ((-0.2, entropy(weights).mean(dim=1), "with 1/√d_k"), (0.2, saturated, "without")):
        right.bar(layers + shift, values, 0.4, label=label)
    right.set(title="entropy of the softmax (nats)", xlabel="layer", xticks=layers)
    left.legend()
    return figure


def positions(observation: Observation) -> Figure:
    """What is added to the encoder's frames to mark their positions (rotary: the cosines of the rotations)."""
    figure = Figure(figsize=(12, 3.5), layout="constrained")
    axes = figure.subplots()
    table = observation.positions
    image = axes.imshow(table.T, aspect="auto", cmap="RdBu", origin="lower", interpolation="nearest")
    axes.set(title="positions", xlabel="encoder frame", ylabel="dimension")
    figure.colorbar(image, ax=axes)
    return figure


def _spikes(axes: Axes, observation: Observation) -> None:
    """The posteriors of the blank and of every token that is likeliest somewhere, with labels where these are high."""
    posteriors = observation.ctc.numpy()
    edges = np.linspace(*observation.frames, len(posteriors) + 1)
    frames = (edges[1:] + edges[:-1]) / 2
    axes.plot(frames, posteriors[:, 0], color="lightgray", linewidth=1, label="blank")
    best = posteriors.argmax(axis=1)
    for token in np.unique(best[best != 0]):
        axes.plot(frames, posteriors[:, token], linewidth=1)
    for frame in np.flatnonzero(best):
        repeats = frame and best[frame - 1] == best[frame]
        if posteriors[frame, best[frame]] > SPIKE and not repeats:
            label = _drawable(observation.symbols[best[frame]])
            axes.text(frames[frame], posteriors[frame, best[frame]] + 0.02, label, ha="center", fontsize=8)
    axes.legend(loc="upper right", fontsize=8)


def _picture(axes: Axes, values: Tensor, edges: tuple[float, float], height: float, downwards: bool = False) -> None:
    origin, extent = ("upper", (*edges, height, 0)) if downwards else ("lower", (*edges, 0, height))
    axes.imshow(values, aspect="auto", origin=origin, extent=extent, interpolation="nearest")


def _table(axes: Axes, values: Tensor, title: str, least: float, most: float) -> None:
    axes.imshow(values, aspect="auto", vmin=least, vmax=most)
    for (row, column), value in np.ndenumerate(values.numpy()):
        shade = "white" if value < (least + most) / 2 else "black"
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=shade, fontsize=8)
    layers, number = values.shape
    axes.set_xticks(range(number), range(1, number + 1))
    axes.set_yticks(range(layers), range(1, layers + 1))
    axes.set_title(title, fontsize=9)
    axes.set(xlabel="head", ylabel="layer")


def _drawable(symbol: str) -> str:
    """A token as matplotlib's own font can draw it: with an escaped dollar, and an underscore for an open box."""
    return symbol.replace("$", r"\$").replace("\u2423", "_")
