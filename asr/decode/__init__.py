"""Third floor: from posteriors to text. Search, long recordings, the recogniser."""

from asr.decode.options import DecodeOptions, Hypothesis
from asr.decode.recognizer import Recognizer
from asr.decode.search import search
from asr.decode.transcript import Segment, Transcript, Word

__all__ = ["DecodeOptions", "Hypothesis", "Recognizer", "Segment", "Transcript", "Word", "search"]
