"""Text for a language model: normalised lines as token ids, in batches of similar length."""

from __future__ import annotations

import gzip
import logging
import lzma
import random
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

from asr.corpus import open_corpus
from asr.text.normalizer import Normalizer
from asr.text.tokenizer import Tokenizer
from asr.training.config import TextConfig
from asr.training.resuming import Resumable, ResumableData

logger = logging.getLogger(__name__)

OPENERS = {".gz": gzip.open, ".xz": lzma.open}
POOL = 100  # batches whose lines are shuffled together, sorted by length and cut


class TextData(ResumableData):
    """The lines of a training as token ids, in batches (Y `(B, U)`, Y_lens `(B,)`)."""

    def __init__(
        self, config: TextConfig, tokenizer: Tokenizer, normalize: Normalizer, seed: int, longest: int | None = None
    ):
        """`longest`: how many tokens the model has positions for. Raises ValueError for texts that cannot be read or
        hold no usable line."""
        super().__init__()
        self.config = config
        self.seed = seed
        self.most, self.limit = config.max_tokens, f"data.max_tokens={config.max_tokens}"
        if longest is not None and longest < config.max_tokens:
            self.most, self.limit = longest, f"the {longest} tokens that model.max_positions has room for"
        self.encode, self.lacks_some = tokenizer.encode, tokenizer.lacks_some
        texts, said, dev = (
            [text for line in lines if (text := normalize(line))]
            for lines in (lines_of(config.train), transcripts_of(config.transcripts), lines_of(config.dev))
        )
        if not config.dev:
            dev, texts = self._held_out(texts)
            if texts and not dev:
                raise ValueError("data.train has too few lines for one to be held out: data.dev names a text")
        self.train_lines = self._encoded(config.train, self._passages(texts))
        self.train_lines += self._encoded(config.transcripts, said)
        self.dev_lines = self._encoded(config.dev or config.train, dev)
        if not self.train_lines or not self.dev_lines:
            raise ValueError(f"data.train and data.dev: no line with text of up to {self.limit}")

    @cached_property
    def tokens(self) -> int:
        """The number of tokens in the training text, the end of each line included."""
        return sum(len(line) + 1 for line in self.train_lines)

    def updates_per_epoch(self, world_size: int) -> int:
        """The number of updates that the processes make together in an epoch."""
        return sum(1 for _ in self._train_batches(0, world_size))

    def train_dataloader(self) -> DataLoader:
        batches = self._train_batches(self.trainer.global_rank, self.trainer.world_size)
        return DataLoader(Lines(self.train_lines), sampler=self.resumable(batches), batch_size=None)

    def batches_by(self) -> list[float]:
        return [len(self.train_lines), self.tokens, self.config.batch_tokens]

    def dev_set(self) -> list[float]:
        return [len(self.dev_lines), sum(map(len, self.dev_lines))]

    def _train_batches(self, rank: int, world_size: int) -> Batches:
        return Batches(self.train_lines, self.config.batch_tokens // world_size, self.seed, rank, world_size)

    def val_dataloader(self) -> DataLoader:
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        batches = Batches(self.dev_lines, self.config.batch_tokens, None, rank, world_size)
        return DataLoader(Lines(self.dev_lines), sampler=Resumable(batches), batch_size=None)

    def _held_out(self, texts: list[str]) -> tuple[list[str], list[str]]:
        """Some of the texts, and the rest. They are chosen by their hashes: most stay held out when texts are added."""
        size = min(self.config.held_out, len(texts) // 2)
        order = sorted(range(len(texts)), key=lambda i: zlib.crc32(f"{self.seed} {texts[i]}".encode()))
        chosen = set(order[:size])
        return [texts[i] for i in order[:size]], [text for i, text in enumerate(texts) if i not in chosen]

    def _passages(self, texts: Iterable[str]) -> Iterator[str]:
        """The texts, each joined to the one before with probability `TextConfig.joined` if the result fits."""
        rng, passage = random.Random(self.seed), ""
        for text in texts:
            longer = f"{passage} {text}"
            if passage and rng.random() < self.config.joined and len(self.encode(longer)) <= self.most:
                passage = longer
                continue
            if passage:
                yield passage
            passage = text
        if passage:
            yield passage

    def _encoded(self, paths: Sequence[str], texts: Iterable[str]) -> list[np.ndarray]:
        """The token ids of the texts that come from `paths`."""
        lines, strange, total = [], [], 0
        for text in texts:
            ids, total = self.encode(text), total + 1
            if self.lacks_some(ids):
                strange.append(text)
            if len(ids) <= self.most:
                lines.append(np.array(ids, np.int32))
        if len(lines) < total:
            longer = f"{total - len(lines)} of {total} lines have more than {self.limit} and are left out"
            logger.warning("%s: %s", ", ".join(paths), longer)
        if strange:
            logger.warning(
                "%s: %d of %d lines have characters that the tokenizer cannot write, as in %r: the language model "
                "learns to write U+FFFD there",
                ", ".join(paths),
                len(strange),
                total,
                strange[0],
            )
        return lines


class Lines(Dataset):
    """Turns the line indices of a batch into Y `(B, U)` and Y_lens `(B,)`."""

    def __init__(self, lines: list[np.ndarray]):
        self.lines = lines

    def __getitem__(self, batch: tuple[list[int], int]) -> tuple[Tensor, Tensor]:
        labels = [torch.from_numpy(self.lines[i]).long() for i in batch[0]]
        if not labels:
            return torch.zeros(0, 0, dtype=torch.long), torch.zeros(0, dtype=torch.long)
        return pad_sequence(labels, batch_first=True), torch.tensor([len(line) for line in labels])


class Batches(Sampler[list[int]]):
    """Batches of line indices, each of up to `batch_tokens` tokens including padding, reshuffled each epoch; seed None:
    sorted by length, always the same. Each of `world_size` processes has every `world_size`-th batch, and all have
    equally many: a shuffled epoch omits its last few for that, a sorted one is filled up with empty batches."""

    def __init__(
        self, lines: Sequence[np.ndarray], batch_tokens: int, seed: int | None, rank: int = 0, world_size: int = 1
    ):
        self.sizes = np.array([len(line) + 1 for line in lines])
        self.batch_tokens = batch_tokens
        self.seed = seed
        self.rank, self.world_size = rank, world_size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        batches = self._batches()
        if self.seed is None:
            batches += [[]] * (-len(batches) % self.world_size)
        whole = len(batches) - len(batches) % self.world_size
        yield from batches[self.rank : whole : self.world_size]

    def _batches(self) -> list[list[int]]:
        if self.seed is None:
            return self._cut(np.argsort(self.sizes, kind="stable"))
        rng = np.random.default_rng((self.seed, self.epoch))
        order = rng.permutation(len(self.sizes))
        pool = max(1, int(POOL * self.batch_tokens / self.sizes.mean()))
        batches = []
        for first in range(0, len(order), pool):
            part = order[first : first + pool]
            batches += self._cut(part[np.argsort(self.sizes[part], kind="stable")])
        rng.shuffle(batches)
        return batches

    def _cut(self, order: np.ndarray) -> list[list[int]]:
        """Cuts `order` into consecutive batches, as large as allowed; the last line of a batch is its longest."""
        batches: list[list[int]] = [[]]
        for i in order.tolist():
            if batches[-1] and (len(batches[-1]) + 1) * self.sizes[i] > self.batch_tokens:
                batches.append([])
            batches[-1].append(i)
        return batches


def lines_of(paths: Sequence[str]) -> Iterator[str]:
    """The lines of texts, plain, `.gz` or `.xz`. Raises ValueError naming a file that cannot be read or is no text."""
    for path in map(Path, paths):
        if path.name.removesuffix(".gz").endswith((".jsonl", ".json", ".tar")):
            raise ValueError(f"{path} is a corpus: its transcripts are for data.transcripts")
        try:
            with OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8-sig") as file:
                yield from file
        except (OSError, UnicodeDecodeError, lzma.LZMAError, zlib.error, EOFError) as error:
            raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def transcripts_of(corpora: Sequence[str]) -> Iterator[str]:
    """The transcripts of corpora in any form, each corpus as often as it is named. Raises ValueError for a path that is
    no corpus."""
    for path in corpora:
        yield from (cut.supervisions[0].text or "" for cut in open_corpus(path))
