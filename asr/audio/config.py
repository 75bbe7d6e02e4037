"""The options of features and augmentation, without what computes them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from asr.audio.reading import SAMPLE_RATE

KINDS = ("log_mel", "whisper", "kaldi", "matrix", "text")
NORMALIZATIONS = ("global", "utterance", "cmvn")


@dataclass(frozen=True)
class FeatureConfig:
    """Configuration of the front end, saved with the weights."""

    # log_mel, whisper or kaldi: computed from audio; matrix: (T, d) as given; text: the ids of its tokens
    kind: str = "log_mel"
    dim: int = 80  # d: mel bands, or the width of the matrices
    window_ms: float = 25.0
    hop_ms: float = 10.0
    # global: mean and std of the training set; utterance: each utterance's own mean instead; cmvn: its own mean and std
    normalization: str = "global"
    pad_seconds: float = 0.0  # whisper: silence pads audio to at least this length, and counts as audio

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"features.kind: {self.kind!r} is not one of {', '.join(KINDS)}")
        if self.normalization not in NORMALIZATIONS:
            choices = ", ".join(NORMALIZATIONS)
            raise ValueError(f"features.normalization: {self.normalization!r} is not one of {choices}")
        if self.pad_seconds < 0 or (self.pad_seconds and self.kind != "whisper"):
            raise ValueError("features.pad_seconds must not be negative, and is for features.kind=whisper alone")
        if self.dim < 1 or self.hop_ms <= 0 or self.window_ms < self.hop_ms:
            raise ValueError("features: dim and hop_ms must be positive, window_ms at least hop_ms")
        if self.takes == "sound" and not round(self.hop_ms * SAMPLE_RATE / 1000):
            raise ValueError(f"features.hop_ms={self.hop_ms} is shorter than a sample")

    @property
    def takes(self) -> str:
        """The kind of input: sound, matrix or text."""
        return self.kind if self.kind in ("matrix", "text") else "sound"

    @property
    def frames_per_second(self) -> float:
        return 1000 / self.hop_ms


@dataclass(frozen=True)
class SpecAugmentConfig:
    freq_masks: int = 2
    freq_width: int = 27  # F: widest frequency mask, in bands
    time_masks: int = 5
    time_ratio: float = 0.05  # widest time mask, as a fraction of the utterance
    # scales the vocal tract of each utterance by 1 - this to 1 + this; for features.kind=log_mel only
    vocal_tract: float = 0.0

    def __post_init__(self):
        if not 0 <= self.vocal_tract <= 0.5:
            raise ValueError(f"spec_augment.vocal_tract: {self.vocal_tract} does not lie in [0, 0.5]")
        if min(self.freq_masks, self.freq_width, self.time_masks) < 0 or not 0 <= self.time_ratio <= 1:
            raise ValueError("spec_augment: counts and widths must not be negative, time_ratio lies in [0, 1]")


@dataclass(frozen=True)
class DistortionConfig:
    """The probability of each distortion of a training utterance, independent of the others."""

    room: float = 0.0  # an exponentially decaying echo of 0.1 to 0.6 s
    noise: float = 0.0  # stationary, between white and brown, 5 to 25 dB below the speech
    voices: float = 0.0  # another utterance of the batch, 5 to 20 dB below the speech
    band: float = 0.0  # a telephone's band in 8-bit mu-law, or nothing above 2 to 6 kHz
    clip: float = 0.0  # clipped at 0.8 to 3 times the root mean square

    def __post_init__(self):
        for each in fields(self):
            if not 0 <= getattr(self, each.name) <= 1:
                raise ValueError(f"distortion.{each.name} must be a probability, not {getattr(self, each.name)}")
