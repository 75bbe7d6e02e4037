"""First floor: corpora as Lhotse cuts."""

from asr.corpus.opening import FORMS, open_corpus, together
from asr.corpus.utterances import Skipped, Utterance, input_kind, iterate, make_cuts, read_cut, write_cuts

__all__ = [
    "FORMS",
    "Skipped",
    "Utterance",
    "input_kind",
    "iterate",
    "make_cuts",
    "open_corpus",
    "read_cut",
    "together",
    "write_cuts",
]
