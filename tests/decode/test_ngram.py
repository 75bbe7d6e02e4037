import math
import sys

import numpy as np
import pytest

from asr.audio.config import FeatureConfig
from asr.decode.ngram import NGram
from asr.decode.options import DecodeOptions, Hypothesis
from asr.decode.recognizer import Recognizer
from asr.model.folder import ModelError
from asr.model.speech_model import SpeechModel
from asr.model.transformer import Transformer
from asr.text.tokenizer import CharTokenizer
from tests.conftest import LETTERS

# log10 P and, except for the highest order, log10 of the backoff weight
ARPA = """\\data\\
ngram 1=5
ngram 2=2

\\1-grams:
-1.0\t<unk>\t0
0\t<s>\t-0.3
-0.7\t</s>\t0
-0.9\tred\t-0.2
-0.8\tfox\t-0.1

\\2-grams:
-0.2\t<s> red
-0.1\tred fox

\\end\\
"""


@pytest.fixture
def ngram(tmp_path) -> NGram:
    pytest.importorskip("kenlm", reason="KenLM is an extra")
    path = tmp_path / "words.arpa"
    path.write_text(ARPA)
    return NGram(path)


def test_a_text_has_the_probability_of_its_words_and_its_end(ngram):
    assert ngram.log_prob("red fox") == pytest.approx((-0.2 - 0.1 + (-0.1 - 0.7)) * math.log(10), abs=1e-5)


def test_a_pair_of_words_never_seen_backs_off(ngram):
    assert ngram.log_prob("fox red") == pytest.approx(
        ((-0.3 - 0.8) + (-0.1 - 0.9) + (-0.2 - 0.7)) * math.log(10), abs=1e-5
    )


def test_rescoring_adds_the_weighted_log_probability_and_sorts(ngram):
    found = [Hypothesis([4], -1.0), Hypothesis([5], -1.5)]
    best, other = ngram.rescore(found, ["fox red", "red fox"], weight=0.5)
    assert (best.tokens, other.tokens) == ([5], [4])
    assert best.score == pytest.approx(-1.5 + 0.5 * ngram.log_prob("red fox"))


def test_the_recogniser_chooses_among_its_n_best(tiny_model, noise_is_heard):
    class Averse(NGram):  # penalises the letter that the model prefers
        def __init__(self):
            pass

        doubted = False

        def log_prob(self, text: str) -> float:
            return -1.0 * text.count("a")

    sound = np.random.default_rng(0).normal(0, 0.1, 30_000).astype(np.float32)
    options = DecodeOptions(beam_size=5, nbest=5, ngram_weight=10.0)
    without = Recognizer(tiny_model, options, precision="float32").transcribe(sound).segments[0].nbest
    text, score = max(without, key=lambda item: item[1] - 10 * item[0].count("a"))
    assert text != without[0][0]
    options = DecodeOptions(beam_size=5, ngram_weight=10.0)
    recognizer = Recognizer(tiny_model, options, ngram=Averse(), precision="float32")
    (found,) = recognizer.transcribe(sound).segments[0].nbest
    assert found == (text, pytest.approx(score - 10 * text.count("a"), abs=1e-4))
    assert recognizer.with_options(strategy="greedy").transcribe(sound).text  # which has no other hypothesis


def test_it_is_asked_for_words_as_the_normaliser_writes_them(tiny_config, noise_is_heard):
    asked = []

    class Listening(NGram):
        def __init__(self):
            pass

        doubted = False

        def log_prob(self, text: str) -> float:
            asked.append(text)
            return 0.0

    model = SpeechModel(FeatureConfig(), Transformer(tiny_config), CharTokenizer(LETTERS.upper()), "english")
    Recognizer(model, ngram=Listening()).transcribe(np.random.default_rng(0).normal(0, 0.1, 30_000).astype(np.float32))
    assert any(asked) and all(text == text.lower() for text in asked)


def test_what_is_no_ngram_model_is_refused_by_name(ngram, tmp_path):
    (tmp_path / "text.arpa").write_text("red fox\n")
    for path, reason in (("text.arpa", "not an n-gram model"), ("none.arpa", "no such")):
        with pytest.raises(ModelError, match=f"{path}.*{reason}"):
            NGram(tmp_path / path)


def test_without_kenlm_the_message_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "kenlm", None)
    with pytest.raises(ModelError, match=r"pip install '\.\[ngram\]'"):
        NGram(tmp_path / "words.arpa")


def test_a_model_that_knows_no_word_is_doubted_once(ngram, caplog):
    few, many = "RED FOX", "THE QUICK RED FOX SAT DOWN"
    for text in (few, many, many, "red fox"):
        ngram.rescore([Hypothesis([4], -1.0)], [text], weight=0.5)
    assert caplog.text.count("knows none of") == 1 and "'QUICK'" in caplog.text
