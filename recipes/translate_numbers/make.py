"""English number words and the French for them, as JSONL manifests of text pairs: train, dev and test share no number.

python recipes/translate_numbers/make.py --out exp/translate_numbers/data
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from num2words import num2words

BEYOND = 1_000_000  # numbers are 0 to 999,999


def draw(count: int, rng: random.Random) -> list[int]:
    """Distinct numbers, as many short ones as long ones: of 1 to 6 digits, as far as there are enough."""
    numbers: dict[int, None] = {}
    while len(numbers) < count:
        numbers[rng.randrange(min(BEYOND, 10 ** rng.randint(1, 6)))] = None
    return list(numbers)


def write(path: Path, numbers: list[int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for number in numbers:
            pair = {"id": str(number), "source": num2words(number), "text": num2words(number, lang="fr")}
            file.write(json.dumps(pair, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for train.jsonl, dev.jsonl and test.jsonl")
    parser.add_argument("--train", type=int, default=20000)
    parser.add_argument("--dev", type=int, default=500)
    parser.add_argument("--test", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    numbers = draw(args.train + args.dev + args.test, random.Random(args.seed))
    held_out = random.Random(args.seed).sample(numbers, args.dev + args.test)
    write(args.out / "dev.jsonl", held_out[: args.dev])
    write(args.out / "test.jsonl", held_out[args.dev :])
    write(args.out / "train.jsonl", sorted(set(numbers) - set(held_out)))


if __name__ == "__main__":
    main()
