"""Tiny models of every kind: their features, and the fields in which they differ from `TINY`."""

from asr.audio.config import FeatureConfig
from asr.model.config import ModelConfig

TINY = ModelConfig(
    d_model=32, num_heads=4, encoder_layers=2, decoder_layers=2, ffn_dim=64, subsampling_channels=4, vocab_size=32
)
MODELS = {
    "conformer, rotary": (FeatureConfig(normalization="utterance"), {"encoder": "conformer", "positions": "rotary"}),
    "window": (FeatureConfig(normalization="cmvn"), {"attention_left": 4, "attention_right": 4}),
    "like Whisper": (
        FeatureConfig(kind="whisper"),
        {"subsampler": "conv1d", "subsampling": 2, "positions": "learned", "ctc": False, "first_timestamp": 30},
    ),
    "like Speech2Text": (
        FeatureConfig(kind="kaldi", normalization="cmvn"),
        {"subsampler": "conv1d_glu", "subsampling": 4, "positions": "sinusoidal_halves", "norm_first": False},
    ),
    "of matrices": (FeatureConfig(kind="matrix"), {"subsampler": "linear", "subsampling": 1}),
    "of text": (FeatureConfig(kind="text"), {"subsampler": "embedding", "subsampling": 1}),
}
