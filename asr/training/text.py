"""Text for a language model: normalised lines as token ids, in batches of similar length."""

from __future__ import annotations

import gzip
import logging
import lzma
import random
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from heapq import heappop, heappush, heappushpop
from itertools import chain
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
HELD_OUT, FEWEST = 2000, 10  # lines held out of a large text and of a small one, unless another number is asked for
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
        self.train_lines, self.dev_lines = Lines(len(tokenizer)), Lines(len(tokenizer))

        def normalized(lines: Iterable[str]) -> Iterator[str]:
            return (text for line in lines if (text := normalize(line)))

        texts, held_out, late = normalized(lines_of(config.train)), [], []
        kept = texts if config.dev else self._kept(texts, held_out, late)
        self._add(self.train_lines, config.train, chain(self._passages(kept), late))
        if config.dev:
            self._add(self.dev_lines, config.dev, normalized(lines_of(config.dev)))
        elif self.train_lines and not held_out:
            raise ValueError("data.train has too few lines for one to be held out: data.dev names a text")
        else:
            self._add(self.dev_lines, config.train, (text for *_, text in held_out))
        self._add(self.train_lines, config.transcripts, normalized(transcripts_of(config.transcripts)))
        if not self.train_lines or not self.dev_lines:
            raise ValueError(f"data.train and data.dev: no line with text of up to {self.limit}")

    @cached_property
    def tokens(self) -> int:
        """The number of tokens in the training text, the end of each line included."""
        return int((self.train_lines.lens + 1).sum())

    def updates_per_epoch(self, world_size: int) -> int:
        """The number of updates that the processes make together in an epoch."""
        return sum(1 for _ in self._train_batches(0, world_size))

    def train_dataloader(self) -> DataLoader:
        batches = self._train_batches(self.trainer.global_rank, self.trainer.world_size)
        return DataLoader(TextDataset(self.train_lines), sampler=self.resumable(batches), batch_size=None)

    def batches_by(self) -> list[float]:
        return [len(self.train_lines), self.tokens, self.config.batch_tokens]

    def dev_set(self) -> list[float]:
        return [len(self.dev_lines), int(self.dev_lines.lens.sum())]

    def _train_batches(self, rank: int, world_size: int) -> Batches:
        return Batches(self.train_lines.lens, self.config.batch_tokens // world_size, self.seed, rank, world_size)

    def val_dataloader(self) -> DataLoader:
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        batches = Batches(self.dev_lines.lens, self.config.batch_tokens, None, rank, world_size)
        return DataLoader(TextDataset(self.dev_lines), sampler=Resumable(batches), batch_size=None)

    def _kept(self, texts: Iterable[str], held_out: list[tuple[int, int, str]], late: list[str]) -> Iterator[str]:
        """The texts that are in the end neither in `held_out` nor in `late`, where those go that were held out until
        others came. They are chosen by their hashes: most stay held out when texts are added."""
        count, most = 0, self.config.held_out or HELD_OUT
        for count, text in enumerate(texts, 1):
            entry = -zlib.crc32(f"{self.seed} {text}".encode()), count, text
            if count <= most:
                heappush(held_out, entry)
            elif (other := heappushpop(held_out, entry)) is entry:
                yield text
            else:
                late.append(other[-1])
        share = count // 2
        if not self.config.held_out:
            share = min(share, max(FEWEST, count // 10))
        late += (heappop(held_out)[-1] for _ in range(len(held_out) - share))

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

    def _add(self, lines: Lines, paths: Sequence[str], texts: Iterable[str]) -> None:
        """Adds the texts, which come from `paths`, to `lines`."""
        total, longer, strange, example = 0, 0, 0, ""
        for text in texts:
            ids, total = self.encode(text), total + 1
            if self.lacks_some(ids):
                strange, example = strange + 1, example or text
            if len(ids) <= self.most:
                lines.append(ids)
            else:
                longer += 1
        if longer:
            logger.warning(
                "%s: %d of %d lines have more than %s and are left out", ", ".join(paths), longer, total, self.limit
            )
        if strange:
            logger.warning(
                "%s: %d of %d lines have characters that the tokenizer cannot write, as in %r: the language model "
                "learns to write U+FFFD there",
                ", ".join(paths),
                strange,
                total,
                example,
            )


class Lines(Sequence[np.ndarray]):
    """Lines as token ids, all in one array: an object for each of millions of lines takes several times the memory."""

    def __init__(self, vocab_size: int):
        self._tokens = array("H" if vocab_size <= 2**16 else "I")
        self._ends = array("q", [0])

    def append(self, ids: Sequence[int]) -> None:
        self._tokens.extend(ids)
        self._ends.append(len(self._tokens))

    @property
    def lens(self) -> np.ndarray:
        """The number of tokens of each line."""
        return np.diff(np.frombuffer(self._ends, np.int64))

    def __getitem__(self, i: int) -> np.ndarray:
        tokens = np.frombuffer(self._tokens, self._tokens.typecode)
        return tokens[self._ends[i] : self._ends[i + 1]].astype(np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1


class TextDataset(Dataset):
    """Turns the line indices of a batch into Y `(B, U)` and Y_lens `(B,)`."""

    def __init__(self, lines: Sequence[np.ndarray]):
        self.lines = lines

    def __getitem__(self, batch: tuple[list[int], int]) -> tuple[Tensor, Tensor]:
        labels = [torch.from_numpy(self.lines[i]) for i in batch[0]]
        if not labels:
            return torch.zeros(0, 0, dtype=torch.long), torch.zeros(0, dtype=torch.long)
        return pad_sequence(labels, batch_first=True), torch.tensor([len(line) for line in labels])


class Batches(Sampler[list[int]]):
    """Batches of line indices, each of up to `batch_tokens` tokens including padding, reshuffled each epoch; seed None:
    sorted by length, always the same. Each of `world_size` processes has every `world_size`-th batch, and all have
    equally many: a shuffled epoch omits its last few for that, a sorted one is filled up with empty batches."""

    def __init__(self, lens: np.ndarray, batch_tokens: int, seed: int | None, rank: int = 0, world_size: int = 1):
        """`lens`: the number of tokens of each line."""
        self.sizes = lens + 1
        self.batch_tokens = batch_tokens
        self.seed = seed
        self.rank, self.world_size = rank, world_size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        batches = self._batches()
        if self.seed is None:
            batches += [np.zeros(0, np.int64)] * (-len(batches) % self.world_size)
        whole = len(batches) - len(batches) % self.world_size
        for batch in batches[self.rank : whole : self.world_size]:
            yield batch.tolist()

    def _batches(self) -> list[np.ndarray]:
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

    def _cut(self, order: np.ndarray) -> list[np.ndarray]:
        """Cuts `order`, by length, into consecutive batches, as large as allowed."""
        sizes, batches, first = self.sizes[order], [], 0
        while first < len(order):
            some = sizes[first : first + max(1, self.batch_tokens // sizes[first])]
            padded = some * np.arange(1, len(some) + 1)
            end = first + max(1, int(np.searchsorted(padded, self.batch_tokens, side="right")))
            batches.append(order[first:end])
            first = end
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
