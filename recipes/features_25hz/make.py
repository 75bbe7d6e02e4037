"""Feature matrices with about as many labels as frames, as with lips and signs at 25 frames per second.

Each label is a hand shape of one or two frames, blurred into the next, under noise; now and then the hands rest for a
frame. The folders train, dev and test get a matrix `(T, 32)` and its labels, written without spaces, per utterance.

    python recipes/features_25hz/make.py --out exp/features_25hz/data
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

SIGNS = "abcdefghijklmnopqrst"
WIDTH = 32  # d


def utterance(rng: np.random.Generator, shapes: np.ndarray, noise: float) -> tuple[np.ndarray, str]:
    """A matrix `(T, d)` and its labels, no two neighbours alike."""
    steps = rng.integers(1, len(SIGNS), rng.integers(10, 41))
    labels = np.cumsum(steps) % len(SIGNS)
    frames: list[np.ndarray] = []
    for label, following in zip(labels, np.append(labels[1:], labels[-1]), strict=True):
        frames += [shapes[label]] * int(rng.integers(0, 2))
        frames.append(0.7 * shapes[label] + 0.3 * shapes[following])
        frames += [np.zeros(WIDTH)] * int(rng.random() < 0.1)
    matrix = np.stack(frames) + rng.normal(0, noise, (len(frames), WIDTH))
    return matrix.astype(np.float16), "".join(SIGNS[label] for label in labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for train/, dev/ and test/")
    parser.add_argument("--train", type=int, default=3000)
    parser.add_argument("--dev", type=int, default=200)
    parser.add_argument("--test", type=int, default=500)
    parser.add_argument("--noise", type=float, default=0.7, help="its deviation; the shapes have 1")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    shapes = rng.normal(0, 1, (len(SIGNS), WIDTH))
    for name in ("train", "dev", "test"):
        folder = args.out / name
        folder.mkdir(parents=True, exist_ok=True)
        for i in range(getattr(args, name)):
            matrix, labels = utterance(rng, shapes, args.noise)
            np.save(folder / f"{i:05d}.npy", matrix)
            (folder / f"{i:05d}.txt").write_text(labels + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
