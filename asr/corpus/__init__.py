"""First floor: corpora as Lhotse cuts."""

from asr.corpus.opening import FORMS, open_corpus
from asr.corpus.utterances import Skipped, Utterance, iterate, make_cuts, read_cut

__all__ = ["FORMS", "Skipped", "Utterance", "iterate", "make_cuts", "open_corpus", "read_cut"]
