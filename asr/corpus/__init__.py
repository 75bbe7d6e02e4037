"""First floor: corpora as Lhotse cuts."""

from asr.corpus.opening import FORMS, open_corpus
from asr.corpus.utterances import MATRIX_FRAMES_PER_SECOND, Skipped, Utterance, iterate, make_cuts, read_cut

__all__ = [
    "FORMS",
    "MATRIX_FRAMES_PER_SECOND",
    "Skipped",
    "Utterance",
    "iterate",
    "make_cuts",
    "open_corpus",
    "read_cut",
]
