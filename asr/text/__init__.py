"""Ground floor: what text is to the model. Normalisers and tokenizers."""

from asr.text.loading import load_tokenizer
from asr.text.normalizer import NORMALIZERS, english, get_normalizer, neutral
from asr.text.tokenizer import BLANK, EOS, SOS, UNK, BPETokenizer, CharTokenizer, Tokenizer

__all__ = [
    "BLANK",
    "EOS",
    "NORMALIZERS",
    "SOS",
    "UNK",
    "BPETokenizer",
    "CharTokenizer",
    "Tokenizer",
    "english",
    "get_normalizer",
    "load_tokenizer",
    "neutral",
]
