"""A model with everything that is needed to turn recordings into transcripts."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import fields, replace
from numbers import Integral
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from asr.audio.features import SILENCE
from asr.audio.reading import SAMPLE_RATE, STEPS_PER_SECOND, AudioError, printable
from asr.decode.alignment import TimedWord, ctc_alignments, timed_words
from asr.decode.confidence import Calibration, word_confidences
from asr.decode.ctc import hears_something
from asr.decode.device import existing_device
from asr.decode.fallback import search_with_fallback
from asr.decode.ngram import NGram
from asr.decode.options import DecodeOptions, Hypothesis, default_options
from asr.decode.phrases import Phrases
from asr.decode.precision import check_precision, in_own_precision, with_precision
from asr.decode.quantization import can_quantize
from asr.decode.recordings import Recording, is_one, matrix_of, name_of, named, sound_of
from asr.decode.search import check_options
from asr.decode.segments import LONGEST, Piece, cut_at_pauses, has_speech
from asr.decode.timestamps import timed_segments
from asr.decode.transcript import Job, Segment, Transcript, Word
from asr.decode.tuning import load_tuning
from asr.heap import keep_kernels, return_freed_blocks
from asr.model.dot_product import leave_out_cudnn
from asr.model.folder import ModelError
from asr.model.language_model import TextModel
from asr.model.speech_model import SpeechModel
from asr.resources import resource
from asr.text.words import as_written

FOREIGN = "whisper:"  # before the path of another toolkit's checkpoint
SURE = 0.7  # mean confidence from which words are trusted: others may come from noise or music
SOON = 15.0  # seconds of audio read before the first batch is decoded; then four times as many each time
SHORTEST_PIECE = 2.0  # seconds to which long recordings are cut for a model trained on single words
KERNELS = 64  # kept by oneDNN on a CPU: hardly any two batches have the same shape
ENCODED = 60.0  # seconds of audio that the encoder gets at once on a CPU: a layer's output stays in the cache
BATCHES_AHEAD = 5  # most batches of pieces that are read before they are sorted by length and decoded


class Recognizer:
    """Turns recordings into transcripts. `asr.load` creates one, and several threads may use it at once."""

    def __init__(
        self,
        model: SpeechModel,
        options: DecodeOptions | None = None,
        batch_seconds: float = 360.0,
        language_model: TextModel | str | os.PathLike | None = None,
        ngram: NGram | str | os.PathLike | None = None,
        precision: str = "auto",
        calibration: Calibration | None = None,
        piece_seconds: float | None = None,
        attention_window: tuple[int, int] | None = None,
        word_times: bool = False,
        int8: bool = False,
        channel: int | None = None,
    ):
        """`batch_seconds` of audio are decoded at once, padding included; `language_model` may be a folder, `ngram` a
        file; `precision` (auto, float32, bfloat16 or int8) is that of the arithmetic, and changes `model` in place and
        permanently (auto uses int8 only with `int8`, which is for models whose word errors were checked with it);
        `calibration` is for the words' confidences; recordings longer than `piece_seconds` are cut at their pauses
        (None: 20 s, or the length of the utterances that the model was trained on; a model with a window, such as
        Whisper, has its own); `attention_window` is the number of frames before and after each that the encoder's
        self-attention sees; with `word_times` words have times if the model has CTC; `channel`, counted from 0, is the
        one to transcribe of files with several (None: their mean).

        Raises ValueError if the language model has other tokens than the model, ModelError if it is no such model."""
        if not 0 < batch_seconds < math.inf:
            raise ValueError(f"batch_seconds must be positive and finite, not {batch_seconds}")
        if piece_seconds is None:
            piece_seconds = max(SHORTEST_PIECE, min(LONGEST, model.trained_seconds or LONGEST))
        if not 1 <= piece_seconds <= 86400:
            raise ValueError(f"piece_seconds must lie between 1 and 86400 (a day), not {piece_seconds}")
        self.takes = model.front_end.config.takes
        if channel is not None and (not isinstance(channel, Integral) or channel < 0):
            raise ValueError(f"channel counts from 0, and is {channel!r}")
        if channel is not None and self.takes != "sound":
            raise ValueError(f"channel is for sound, but this model takes {self.takes}")
        if language_model is not None:
            if not isinstance(language_model, TextModel):
                language_model = TextModel.load(language_model, model.device)
            if language_model.tokenizer != model.tokenizer:
                raise ValueError("the language model has other tokens than the model: train it with its tokenizer")
            if language_model.transformer.config.eos != model.transformer.config.eos:
                raise ValueError("the language model has another end token than the model: train it anew")
            language_model = language_model.transformer.eval()
        self.ngram = ngram if ngram is None or isinstance(ngram, NGram) else NGram(ngram)
        self.model = model.eval()
        self.options = options or default_options(model.transformer.ctc is not None)
        check_options(model.transformer, self.options, language_model)
        self.phrases = self._tables_of_phrases()
        self.int8 = precision == "int8" or (precision == "auto" and int8)
        if self.int8 and precision == "auto" and can_quantize(model.device):
            precision = "int8"
        for each in filter(None, (model.transformer, language_model)):
            check_precision(each, precision)
        # from here on the model is changed
        if attention_window:
            model.transformer.set_window(*attention_window)
        model.transformer = with_precision(model.transformer, precision)
        self.language_model = None if language_model is None else with_precision(language_model, precision)
        if model.device.type == "cuda":
            leave_out_cudnn()
        self.channel, self.batch_seconds, self.calibration = channel, batch_seconds, calibration
        rates = {"sound": SAMPLE_RATE, "matrix": model.front_end.config.frames_per_second, "text": STEPS_PER_SECOND}
        self.rate = rates[self.takes]
        self.window = model.front_end.config.pad_seconds  # seconds to which every piece is padded
        self.piece_seconds = self.window or piece_seconds
        self.word_times = word_times and model.transformer.ctc is not None

    @classmethod
    def load(cls, folder: str | Path | None = None, device: str | None = None, **settings) -> Recognizer:
        """The recogniser of a model folder (None: the model that ships with the package); `settings` are those of
        `__init__` and any fields of `DecodeOptions`, each of which replaces only that field.

        `device` None is a GPU if there is one. The settings tuned for the model (`asr.tune`) and its language model are
        in its folder, too, and are the defaults. Raises ModelError if the folder is no model folder, ValueError if the
        device does not exist. `whisper:PATH` is a checkpoint of Whisper or Speech2Text, as `asr.model.foreign` imports
        it."""
        given = {option.name: settings.pop(option.name) for option in fields(DecodeOptions) if option.name in settings}
        device = existing_device(device)
        if torch.device(device).type == "cpu":
            keep_kernels(KERNELS)
        if str(folder).startswith(FOREIGN):
            from asr.model.foreign import import_model

            model, tuned = import_model(str(folder).removeprefix(FOREIGN)).to(device), {}
        else:
            if not str(folder):  # which would be the current directory
                raise ModelError("the model folder has no name")
            folder = Path(resource("data", "models", "english") if folder is None else folder)
            model, tuned = SpeechModel.load(folder, device), load_tuning(folder)._asdict()
        settings = tuned | settings
        options = settings.pop("options", None) or default_options(model.transformer.ctc is not None)
        return cls(model, options=replace(options, **given), **settings)

    def with_options(self, **options) -> Recognizer:
        """The same recogniser with other fields of `DecodeOptions` for a single request (`phrases=names`); its models
        are shared, not copied. Raises ValueError for options that the model does not support."""
        other = copy(self)
        other.options = replace(self.options, **options)
        check_options(self.model.transformer, other.options, self.language_model)
        if options.keys() & {"phrases", "phrase_weight"}:
            other.phrases = other._tables_of_phrases()
        return other

    def transcribe(self, recording: Recording) -> Transcript:
        """The transcript of a file (its path, its bytes, or a binary file object), or of an array or a tensor: samples
        `(N,)` at 16 kHz, or a matrix `(T, d)` if the model reads matrices; if it reads text, of a string. Raises
        AudioError if the recording cannot be read."""
        transcript = next(self.transcribe_all([recording]))
        if transcript.error:
            raise AudioError(transcript.error)
        return transcript

    def transcribe_all(
        self, recordings: Iterable[Recording], progress: Callable[[float], None] | None = None
    ) -> Iterator[Transcript]:
        """The transcripts of many recordings, in order, decoded in batches sorted by length, in bounded memory.

        A recording that cannot be read, or not to its end, gives a transcript with an error. `progress` is called with
        the seconds of each decoded batch. Raises TypeError for a single recording. An item that is no recording raises
        TypeError, and an exception of `recordings` is raised, after the transcripts of the recordings before."""
        if is_one(recordings):
            raise TypeError("transcribe_all takes several recordings: use transcribe for one")
        waiting: list[Job] = []
        pieces: list[tuple[Job, Piece]] = []
        raised: list[Exception] = []
        seconds, ahead = 0.0, min(SOON, self.batch_seconds)
        for job, piece in self.read((Job(name), recording) for name, recording in named(recordings, raised)):
            if not waiting or waiting[-1] is not job:
                waiting.append(job)
            if piece is not None:
                pieces.append((job, piece))
                seconds += len(piece.samples) / self.rate
            if seconds >= ahead:
                self._decode(pieces, progress)
                pieces, seconds, ahead = [], 0.0, min(4 * ahead, BATCHES_AHEAD * self.batch_seconds)
                while waiting and waiting[0].is_read:
                    yield waiting.pop(0).transcript()
        self._decode(pieces, progress)
        for job in waiting:
            yield job.transcript()
        if raised:
            raise raised[0]

    def read(self, jobs: Iterable[tuple[Job, Recording]]) -> Iterator[tuple[Job, Piece | None]]:
        """Yields every piece of every recording; each recording ends with None."""
        for job, recording in jobs:
            try:
                for piece in self._pieces(recording, job):
                    if reason := self.too_long(len(piece.samples)):
                        raise AudioError(f"{job.name}: {reason}")
                    yield job, piece
            except AudioError as error:
                job.error = printable(str(error))
            job.is_read = True
            yield job, None

    def pieces(self, recording: Recording) -> Iterator[Piece]:
        """Yields the pieces of a recording, each of which is decoded as a whole, in order. Raises AudioError if the
        recording cannot be read, after the pieces before the error."""
        job = Job(name_of(recording))
        yield from self._pieces(recording, job)
        if job.error:
            raise AudioError(job.error)

    def too_long(self, steps: int) -> str | None:
        """Why so many samples, or matrix rows, exceed a learned table of positions; None if they do not."""
        config, encoder = self.model.transformer.config, self.model.transformer.encoder
        if config.positions != "learned":
            return None
        frames = int(encoder.subsampling.output_lens(self.model.front_end.output_lens(torch.tensor(steps))))
        most = config.max_positions
        return f"{frames} encoder frames are more than model.max_positions={most}" if frames > most else None

    def _pieces(self, recording: Recording, job: Job) -> Iterator[Piece]:
        if self.takes == "sound":
            yield from cut_at_pauses(self._timed(sound_of(recording, self.channel), job), self.piece_seconds)
            return
        whole = (
            matrix_of(recording, self.model.front_end.config.dim) if self.takes == "matrix" else self._ids(recording)
        )
        job.duration = len(whole) / self.rate
        job.check(job.duration)
        if len(whole):
            yield Piece(0.0, whole)

    def _ids(self, text: Recording) -> np.ndarray:
        if not isinstance(text, str):
            raise AudioError(f"{name_of(text)}: this model reads text, not sound or matrices")
        return np.array(self.model.tokenizer.encode(self.model.normalize(text)), np.int64)

    def _timed(self, blocks: Iterator[np.ndarray], job: Job) -> Iterator[np.ndarray]:
        try:
            for block in blocks:
                job.duration += len(block) / self.rate
                job.check(job.duration)
                yield block
        except AudioError as error:  # the blocks before it are still transcribed
            job.error = printable(str(error))

    def _decode(self, pieces: list[tuple[Job, Piece]], progress: Callable[[float], None] | None) -> None:
        pieces = sorted(pieces, key=lambda item: -len(item[1].samples))
        while pieces:
            size = self.fitting(self.batch_seconds, len(pieces[0][1].samples))
            batch, pieces = pieces[:size], pieces[size:]
            for (job, piece), found in zip(batch, self.recognize([p.samples for _, p in batch]), strict=True):
                job.segments += self.segments(piece, found)
            if progress:
                progress(sum(len(piece.samples) for _, piece in batch) / self.rate)
        return_freed_blocks()

    def fitting(self, seconds: float, longest: int) -> int:
        """How many inputs, the longest of which has `longest` steps, fit into `seconds` with padding: at least one."""
        return max(1, int(seconds / max(longest / self.rate, self.window, 1 / self.rate)))

    @in_own_precision
    def recognize(self, inputs: list[np.ndarray]) -> list[list[Hypothesis]]:
        """The hypotheses, best first, for each input of a batch: samples `(N,)`, matrices `(T, d)` or token ids `(T,)`.

        The hypothesis is empty if the input is silent, if CTC (where it has a weight) hears nothing but noise, or if
        the words are doubtful and silero-vad finds no speech."""
        if not inputs:
            return []
        memory, memory_lens = self.encode(inputs)
        found = self.said(inputs, self.search(memory, memory_lens))
        if self.word_times:
            log_probs = self.model.transformer.ctc_log_probs(memory)
            spans = ctc_alignments(log_probs, memory_lens, [nbest[0].tokens for nbest in found])
            found = [[replace(best, spans=span), *rest] for (best, *rest), span in zip(found, spans, strict=True)]
        return found

    @in_own_precision
    def align(self, inputs: list[np.ndarray], transcripts: list[str]) -> list[list[TimedWord] | None]:
        """When each word of a batch is said, given samples `(N,)` at 16 kHz or matrices `(T, d)` and their normalised
        transcripts. A word lasts from where CTC hears its first token to where it hears its last. None for an input
        that is silent or has too few frames for its text.

        Raises ValueError for a model without CTC, or one that reads text."""
        if not self.model.transformer.ctc or self.takes == "text":
            raise ValueError("word times come from CTC, and this model has none or reads text")
        if not inputs:
            return []
        memory, memory_lens = self.encode(inputs)
        tokens = [self.model.tokenizer.encode(text) for text in transcripts]
        spans = ctc_alignments(self.model.transformer.ctc_log_probs(memory), memory_lens, tokens)
        found = []
        for text, row, span in zip(transcripts, tokens, spans, strict=True):
            words = None if span is None else timed_words(self.model, row, span)
            if words:
                said = as_written([word.text for word in words], text)
                words = [replace(word, text=each) for word, each in zip(words, said, strict=True)]
            found.append(words)
        return found

    @in_own_precision
    def encode(self, inputs: list[np.ndarray]) -> tuple[Tensor, Tensor]:
        """The encoder's memory `(B, M, D)` of a batch and its lengths `(B,)`: 0 for silent inputs. To train something
        on them, clone these inference tensors."""
        on_cpu = self.model.device.type == "cpu"
        size = self.fitting(ENCODED, max(map(len, inputs))) if on_cpu else len(inputs)
        parts = [inputs[i : i + size] for i in range(0, len(inputs), size)]
        memories, lens = zip(*(self.model.transformer.encoder(*self.features(part)) for part in parts), strict=True)
        rows = [row for memory in memories for row in memory]
        return pad_sequence(rows, batch_first=True), torch.cat(lens)

    @in_own_precision
    def features(self, inputs: list[np.ndarray]) -> tuple[Tensor, Tensor]:
        """The encoder's input for a batch, and its lengths `(B,)`: 0 for silent inputs."""
        device = self.model.device
        lens = torch.tensor([len(x) for x in inputs], device=device)
        padded = pad_sequence([torch.from_numpy(x) for x in inputs], batch_first=True).to(device)
        X, X_lens = self.model.front_end(padded, lens)
        if self.takes == "sound":
            X_lens = X_lens.masked_fill(padded.abs().amax(dim=1) < SILENCE, 0)
        return X, X_lens

    @in_own_precision
    def search(self, memory: Tensor, memory_lens: Tensor) -> list[list[Hypothesis]]:
        """The hypotheses of each utterance, best first, from the encoder's memory `(B, M, D)`, memory_lens `(B,)`."""
        transformer, options, weight = self.model.transformer, self.options, self.options.ngram_weight
        if options.ctc_weight and transformer.ctc:  # a decoder and a language model always find something to say
            heard = hears_something(transformer.ctc_log_probs(memory), memory_lens)
            memory_lens = memory_lens.masked_fill(~heard, 0)
        beside = self.language_model, self._text, self.phrases
        if options.nbest == 1 and (self.ngram is None or options.strategy == "greedy"):
            return search_with_fallback(transformer, memory, memory_lens, options, *beside)
        all_of_them = replace(options, nbest=options.beam_size)
        found = search_with_fallback(transformer, memory, memory_lens, all_of_them, *beside)
        found = [self._distinct(best) for best in found]
        if self.ngram is not None:
            texts = ([self.model.normalize(self._text(h)) for h in best] for best in found)
            found = [self.ngram.rescore(best, said, weight) for best, said in zip(found, texts, strict=True)]
        return [best[: options.nbest] for best in found]

    def said(self, inputs: list[np.ndarray], found: list[list[Hypothesis]]) -> list[list[Hypothesis]]:
        """The hypotheses found in the inputs, or an empty one for an input with doubtful words and no speech."""
        if self.takes != "sound":
            return found
        said = (not self._is_doubtful(best[0]) or has_speech(x) for x, best in zip(inputs, found, strict=True))
        return [best if is_said else [Hypothesis([], 0.0)] for is_said, best in zip(said, found, strict=True)]

    def _is_doubtful(self, hypothesis: Hypothesis) -> bool:
        confidences = [word.confidence for word in self._words(hypothesis, 0.0)]
        return sum(confidences) < SURE * len(confidences)

    def _tables_of_phrases(self) -> Phrases | None:
        options, model = self.options, self.model
        # normalised like the model's transcripts, or as they are, for a model that writes capitals
        ways = [dict.fromkeys((model.normalize(text), " ".join(text.split()))) for text in options.phrases]
        ways = [each for ways_of_one in ways if (each := [way for way in ways_of_one if way])]
        phrases = Phrases.of(ways, options.phrase_weight, model.tokenizer)
        return phrases and phrases.to(model.device)

    def _distinct(self, hypotheses: list[Hypothesis]) -> list[Hypothesis]:
        """The hypotheses with distinct texts: the first of those that write the same text with other subwords."""
        found: dict[str, Hypothesis] = {}
        for hypothesis in hypotheses:
            found.setdefault(self._text(hypothesis), hypothesis)
        return list(found.values())

    def _text(self, hypothesis: Hypothesis) -> str:
        return self.model.tokenizer.decode(hypothesis.tokens).strip()

    def segments(self, piece: Piece, found: list[Hypothesis]) -> list[Segment]:
        """One segment, or one for each stretch of the best hypothesis with its own times; each of those is one-best."""
        seconds, segments = len(piece.samples) / self.rate, []
        parts = timed_segments(found[0], self.model.transformer.config)
        for begin, end, part in parts:
            texts = [(self._text(h), h.score) for h in (found if len(parts) == 1 else [part])]
            begin, end = (seconds if time is None else min(time, seconds) for time in (begin or 0.0, end))
            words = self._words(part, piece.start)
            segments.append(Segment(piece.start + begin, piece.start + end, *texts[0], texts, words))
        return segments

    def _words(self, hypothesis: Hypothesis, start: float) -> list[Word]:
        words = self.model.tokenizer.words(hypothesis.tokens)
        scores = [tuple(hypothesis.token_scores[part]) for _, part in words]
        confidences = word_confidences(scores, self.calibration).tolist()
        times: list[tuple[float | None, float | None]] = [(None, None)] * len(words)
        if hypothesis.spans:
            timed = timed_words(self.model, hypothesis.tokens, hypothesis.spans)
            times = [(start + word.start, start + word.end) for word in timed]
        rows = zip(words, confidences, times, scores, strict=True)
        return [Word(text, confidence, *time, score) for (text, _), confidence, time, score in rows]
