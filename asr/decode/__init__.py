"""Third floor: from posteriors to text. Search, long recordings, the recogniser."""

from asr.decode.options import DecodeOptions, Hypothesis
from asr.decode.recognizer import Recognizer, Segment, Transcript, Word
from asr.decode.search import search

__all__ = ["DecodeOptions", "Hypothesis", "Recognizer", "Segment", "Transcript", "Word", "search"]
