"""From corpora to batches: the utterances that can be trained on, sampled by duration, on their way to the device."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
from collections.abc import Callable
from itertools import chain, pairwise
from zlib import crc32

import numpy as np
import torch
from lhotse import CutSet, MonoCut
from lhotse.dataset.sampling.base import CutSampler
from lhotse.dataset.sampling.dynamic_bucketing import FixedBucketBatchSizeConstraint

from asr.audio.config import FeatureConfig
from asr.audio.features import FrontEnd
from asr.audio.reading import SAMPLE_RATE, STEPS_PER_SECOND
from asr.corpus import input_kind, open_corpus
from asr.corpus.utterances import kept
from asr.model.encoder import Encoder
from asr.model.speech_model import SpeechModel
from asr.text.normalizer import get_normalizer
from asr.text.tokenizer import CharTokenizer, Tokenizer
from asr.training.batches import Bucket, BucketSampler, PlainSampler, SpeechDataset, TimedLoader, make_buckets
from asr.training.conditions import Conditions
from asr.training.config import DataConfig, SoundConfig
from asr.training.resuming import Resumable, ResumableData

logger = logging.getLogger(__name__)

TRAINING_SET, DEV_SET = "training set", "dev set"  # as messages name them

# why a cut that has so many encoder frames, at the highest speed, is left out; None: it is not
Unfit = Callable[[MonoCut, int], str | None]


class SoundData(ResumableData):
    """The corpora of a training, checked and batched, without their transcripts."""

    tokenizer: Tokenizer | None = None
    most_labels: int | None = None  # that the decoder has positions for; None: any number
    most_text_tokens: int | None = None  # of a text, that the encoder has positions for; None: any number
    window = 0.0  # seconds to which the front end pads what is shorter

    def __init__(self, config: SoundConfig, seed: int, devices: int = 1):
        """`devices`: how many, over all machines, share an update."""
        super().__init__()
        self.config = config
        self.batches_of_update, self.batch_seconds = config.shared_by(devices)  # on each device
        self.seed = seed
        self.train_cuts = self._open(config.train, TRAINING_SET)
        self.dev_cuts = self._open(config.dev, DEV_SET)

    def _open(self, corpora: list[str], what: str) -> CutSet:
        return open_corpus(corpora, transcribed=False)

    def fit_to(self, front_end: FrontEnd, encoder: Encoder) -> None:
        """Leaves out and reports by name the cuts that are outside the limits, too short for one encoder frame or too
        long for the encoder's positions."""
        if front_end.config.takes == "text":
            raise ValueError("features.kind=text: without transcripts an encoder can only learn from sound or matrices")

        def unfit(cut: MonoCut, frames: int) -> str | None:
            return self._outside(cut) or (None if frames else "it is too short for an encoder frame")

        self._fit_to(front_end, encoder, unfit, unfit)

    def _fit_to(self, front_end: FrontEnd, encoder: Encoder, unfit: Unfit, unfit_for_dev: Unfit) -> None:
        """Leaves out and reports by name the cuts that a reason is given for, and those that are too long for the
        encoder's positions; buckets the remaining training set."""
        self.window = front_end.config.pad_seconds
        self._take(front_end.config)
        most = encoder.config.max_positions
        learned = encoder.positions.kind == "learned"
        self.most_text_tokens = most if learned else None

        def fit(cuts: CutSet, what: str, speeds: list[float], unfit: Unfit) -> CutSet:
            common = front_end, encoder, self.tokenizer
            fewest = memory_lengths(cuts, max(speeds), *common)
            frames = memory_lengths(cuts, min(speeds), *common) if learned else {}

            def reason(cut: MonoCut) -> str | None:
                why = unfit(cut, fewest[cut.id])
                if not why and frames.get(cut.id, 0) > most:
                    why = f"its {frames[cut.id]} encoder frames are more than model.max_positions={most}"
                return why

            return _fit(cuts, what, reason)

        self.train_cuts = fit(self.train_cuts, TRAINING_SET, self.speeds, unfit)
        self.dev_cuts = fit(self.dev_cuts, DEV_SET, [1.0], unfit_for_dev)
        self.buckets = make_buckets(self._heard(self.train_cuts), self.batch_seconds)

    def _outside(self, cut: MonoCut) -> str | None:
        """Why a cut is outside the limits; None: it is not."""
        least, most = self.config.min_seconds, self.config.max_seconds
        if least <= cut.duration <= most:
            return None
        return f"{cut.duration:.4g} s is outside data.min_seconds={least:g} to data.max_seconds={most:g}"

    def _take(self, features: FeatureConfig) -> None:
        """Sets the speeds and recording conditions for these features. Raises ValueError for cuts and options that do
        not fit the features, or if `Conditions` does."""
        for option in ("rirs", "noises", "codec"):
            if getattr(self.config, option) and features.takes != "sound":
                raise ValueError(f"data.{option} is for sound, but this model takes {features.takes}")
        is_sound = features.takes == "sound"
        self.conditions = Conditions(self.config) if is_sound else None
        self.speeds = self.config.speeds if is_sound else [1.0]
        for cut in (*self.train_cuts, *self.dev_cuts):
            if input_kind(cut) != features.takes:
                raise ValueError(
                    f"{cut.id} is {input_kind(cut)}, and features.kind={features.kind} takes {features.takes}"
                )
            if features.takes == "matrix" and cut.custom["width"] != features.dim:
                raise ValueError(f"{cut.id}: its matrix is {cut.custom['width']} wide, and features.dim={features.dim}")

    def _heard(self, cuts: CutSet) -> list[float]:
        """The seconds of each cut as the encoder hears it: some front ends pad to a window."""
        return [max(cut.duration, self.window) for cut in cuts]

    @property
    def train_seconds(self) -> float:
        return sum(cut.duration for cut in self.train_cuts)

    @property
    def usual_seconds(self) -> float:
        """The 99th percentile of the training set's durations."""
        return round(float(np.quantile([cut.duration for cut in self.train_cuts], 0.99)), 2)

    def train_dataloader(self) -> TimedLoader:
        return self._loader(self.resumable(self._train_sampler()), self.speeds, self.buckets, self.conditions)

    def dev_set(self) -> list[float]:
        return [len(self.dev_cuts), sum(cut.duration for cut in self.dev_cuts)]

    def batches_by(self) -> list[float]:
        return [len(self.train_cuts), *chain.from_iterable(self.buckets)]

    def batches_per_epoch(self) -> int:
        """The number of batches in an epoch, over all processes."""
        edges, utterances = map(np.array, zip(*self.buckets, strict=True))
        durations = [cut.duration for cut in self.train_cuts]
        sizes = np.bincount(np.searchsorted(edges, durations), minlength=len(edges))
        return int(np.ceil(sizes / utterances).sum())

    def _train_sampler(self, **ranks: int) -> CutSampler:
        seconds, utterances = map(list, zip(*self.buckets, strict=True))
        if len(seconds) == 1:
            return PlainSampler(self.train_cuts, max_cuts=utterances[0], shuffle=True, seed=self.seed, **ranks)
        constraint, bins = FixedBucketBatchSizeConstraint(seconds, utterances), seconds[:-1]
        return BucketSampler(self.train_cuts, self.seed, constraint=constraint, duration_bins=bins, **ranks)

    def _dev_sampler(self, **ranks: int) -> CutSampler:
        longest_first, limit = self.dev_cuts.sort_by_duration(), self._dev_limit
        most = int(limit // self.window) if self.window else None
        return PlainSampler(longest_first, max_duration=limit, max_cuts=most, **ranks)

    @property
    def _dev_limit(self) -> float:
        return max(self.batch_seconds, *self._heard(self.dev_cuts))

    def val_dataloader(self) -> TimedLoader:
        buckets = make_buckets(self._heard(self.dev_cuts), self._dev_limit)
        return self._loader(Resumable(self._dev_sampler()), [1.0], buckets)

    def _loader(
        self, batches: Resumable, speeds: list[float], buckets: list[Bucket], conditions: Conditions | None = None
    ) -> TimedLoader:
        workers = self.config.workers
        if workers < 0:  # the processes of a machine share its cores
            workers = min(8, max(1, _cores() // (self.trainer.num_devices if self.trainer else 1)))
        return TimedLoader(
            SpeechDataset(
                self.tokenizer, speeds, buckets, self.most_labels, conditions, self.most_text_tokens, self.window
            ),
            sampler=batches,
            batch_size=None,
            num_workers=workers,
            worker_init_fn=_begin_reading,
            # workers forked again each epoch would share the trainer's pages, each of which is then copied when written
            persistent_workers=workers > 0,
            pin_memory=torch.cuda.is_available(),
        )


class SpeechData(SoundData):
    """The corpora of a training, with normalised transcripts."""

    config: DataConfig

    def __init__(self, config: DataConfig, seed: int, devices: int = 1, inherited: str | None = None):
        """`inherited`: the normaliser of the model whose tokenizer is kept, if any; then `auto` stands for it."""
        self.unasked = ""  # where an `auto` normaliser comes from
        if config.normalizer == "auto":
            self.unasked = "that of the model whose tokenizer is kept" if inherited else "the default"
            config.normalizer = inherited or config.normalizer_name  # the config is saved with the training
        super().__init__(config, seed, devices)

    def _open(self, corpora: list[str], what: str) -> CutSet:
        return _normalized(open_corpus(corpora), what, self.config.normalizer, self.unasked)

    def dev_set(self) -> list[float]:
        said = "\n".join(cut.supervisions[0].text for cut in self.dev_cuts)  # as this training normalises it
        return [*super().dev_set(), crc32(said.encode(errors="backslashreplace"))]

    def texts(self) -> list[str]:
        """The normalised transcripts of the training set, and the texts that it has in the place of audio."""
        sources = (cut.custom["source"] for cut in self.train_cuts if input_kind(cut) == "text")
        return [*self.transcripts(), *sources]

    def transcripts(self) -> list[str]:
        """The normalised transcripts of the training set."""
        return [cut.supervisions[0].text for cut in self.train_cuts]

    def fit_to(self, model: SpeechModel) -> None:
        """Adopts the model's tokenizer, and leaves out and reports by name the cuts that the model cannot train on:
        those outside the limits, those that encoder or decoder have no positions for, and those too short for their
        labels at the highest speed. With CTC the memory must be as long as the labels with one blank for each
        repetition, else as long as `tokens_per_frame` requires."""
        self.tokenizer = model.tokenizer
        self.most_labels = model.transformer.config.longest_transcript
        strange: list[str] = []

        def unfit(cut: MonoCut, frames: int) -> str | None:
            labels = self.tokenizer.encode(cut.supervisions[0].text)
            if self.tokenizer.lacks_some(labels):
                strange.append(cut.supervisions[0].text)
            return self._outside(cut) or self._unplaced_labels(labels) or self._too_short(frames, labels, model)

        def unfit_for_dev(cut: MonoCut, _: int) -> str | None:
            return self._unplaced_labels(self.tokenizer.encode(cut.supervisions[0].text))

        self._fit_to(model.front_end, model.transformer.encoder, unfit, unfit_for_dev)
        if strange:
            logger.warning(
                "%d transcripts have characters that the tokenizer cannot write, as in %r: the model learns to write "
                "U+FFFD there (one of its own can: new_tokenizer=true beside init_from, or no tokenizer.folder)",
                len(strange),
                strange[0],
            )

    def _unplaced_labels(self, labels: list[int]) -> str | None:
        """Why the decoder has too few positions for the labels; None: it has enough."""
        if self.most_labels is None or len(labels) <= self.most_labels:
            return None
        return f"{len(labels)} labels are more than the {self.most_labels} that the decoder has positions for"

    def _too_short(self, frames: int, labels: list[int], model: SpeechModel) -> str | None:
        """Why the encoder frames are too few for the labels; None: they are enough."""
        needed = len(labels) + sum(a == b for a, b in pairwise(labels))
        if not model.transformer.ctc:
            needed = math.ceil(len(labels) / model.transformer.config.tokens_per_frame)
        if frames >= needed:
            return None
        speed = f" at data.speeds={max(self.speeds)}" if max(self.speeds) > 1 else ""
        blanks = f" and {needed - len(labels)} blanks between equal ones" if needed > len(labels) else ""
        fewer = " (tokenizer.kind=bpe makes fewer)" if isinstance(self.tokenizer, CharTokenizer) else ""
        return f"{frames} encoder frames{speed} are too few for {len(labels)} labels{blanks}{fewer}"


def _begin_reading(_: int) -> None:
    """Makes a worker ignore signals that end all processes of a job: the one that trains saves first, then ends it."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if not torch.cuda.is_available() and hasattr(os, "SCHED_IDLE"):  # Linux only
        # it uses only core time that no other thread needs, and gives it back at once: each operation of the training
        # threads lasts as long as the one that was kept waiting
        with contextlib.suppress(OSError):  # in a sandbox without scheduling classes
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _cores() -> int:
    """The number of this machine's cores that the process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_lengths(
    cuts: CutSet, speed: float, front_end: FrontEnd, encoder: Encoder, tokenizer: Tokenizer | None = None
) -> dict[str, int]:
    """The number of encoder frames of each cut, by its name, with audio played at `speed`."""
    steps = {
        "sound": lambda cut: int(cut.duration / speed * SAMPLE_RATE),
        "matrix": lambda cut: round(cut.duration * STEPS_PER_SECOND),
        "text": lambda cut: len(tokenizer.encode(cut.custom["source"])),
    }[front_end.config.takes]
    lens = encoder.subsampling.output_lens(front_end.output_lens(torch.tensor([steps(cut) for cut in cuts])))
    return dict(zip((cut.id for cut in cuts), lens.tolist(), strict=True))


def _fit(cuts: CutSet, what: str, unfit: Callable[[MonoCut], str | None]) -> CutSet:
    """The cuts that are `kept`; raises ValueError if there are none."""
    fit = kept(cuts, what, unfit)
    if not fit:
        raise ValueError(f"{what}: no utterance is left")
    return CutSet.from_cuts(fit)


def _normalized(cuts: CutSet, what: str, normalizer: str, unasked: str = "") -> CutSet:
    """The cuts of the set `what` with normalised transcripts. Warns if a normaliser that was not asked for (`unasked`
    says where it comes from) drops letters or digits of transcripts, or writes them otherwise."""
    normalize, changed = get_normalizer(normalizer), []
    for cut in cuts:
        said = cut.supervisions[0].text or ""
        written = cut.supervisions[0].text = normalize(said)
        if unasked and any(c.isalnum() and c.lower() not in written for c in set(said)):
            changed.append((said, written))
        if input_kind(cut) == "text":
            cut.custom["source"] = normalize(cut.custom["source"])

    def empty(cut: MonoCut) -> str | None:
        if input_kind(cut) == "text" and not cut.custom["source"]:
            return "its source is empty after normalisation"
        return None if cut.supervisions[0].text else "its transcript is empty after normalisation"

    fit = _fit(cuts, what, empty)
    if changed:
        logger.warning(
            "data.normalizer=%s, %s, rewrites %d of %d transcripts, as %r, which becomes %r (neutral keeps letters and"
            " digits, none keeps everything; data.normalizer=%s confirms that this is intended)",
            *(normalizer, unasked, len(changed), len(cuts), *changed[0], normalizer),
        )
    return fit
