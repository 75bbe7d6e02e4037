import pytest
import torch

from asr.text.tokenizer import SPECIALS, CharTokenizer, SubwordTokenizer
from asr.training.vocabulary import transfer_vocabulary

TEXTS = ["red red fox", "blue sky", "green red"] * 9


@pytest.fixture
def characters():
    return CharTokenizer.train(TEXTS)


@pytest.fixture
def subwords():
    return SubwordTokenizer.train(TEXTS, 24)


def exchanged(tokenizer, origin, **known):
    """Rows that were filled with 7, after the transfer from `origin`."""
    rows = {name: torch.full((len(tokenizer), *of_origin.shape[1:]), 7.0) for name, of_origin in known.items()}
    transfer_vocabulary(rows, known, tokenizer, origin)
    return rows


def test_a_token_begins_as_the_mean_of_those_that_wrote_it(characters, subwords):
    embedding, bias = torch.randn(len(characters), 5), torch.randn(len(characters))
    rows = exchanged(subwords, characters, embedding=embedding, bias=bias)
    token = next(i for i in range(len(subwords)) if subwords.piece(i) == "\u2581red")
    parts = characters.encode(" red")
    torch.testing.assert_close(rows["embedding"][token], embedding[parts].mean(dim=0))
    torch.testing.assert_close(rows["bias"][token], bias[parts].mean())
    for special in range(len(SPECIALS)):
        assert torch.equal(rows["embedding"][special], embedding[special])


def test_the_longest_token_that_fits_counts(subwords):
    known = torch.randn(len(subwords), 5)
    assert torch.equal(exchanged(subwords, subwords, embedding=known)["embedding"], known)


def test_what_the_origin_cannot_write_stays_as_it_is(subwords):
    origin = CharTokenizer("red ")
    rows = exchanged(subwords, origin, embedding=torch.zeros(len(origin), 5))["embedding"]
    for token in range(len(SPECIALS), len(subwords)):
        assert rows[token].eq(0).all() == set(subwords.piece(token)).issubset("red\u2581"), subwords.piece(token)


def test_what_only_one_of_the_models_has_stays_as_it_is(characters, subwords):
    rows = {"ctc.weight": torch.full((len(subwords), 5), 7.0)}
    transfer_vocabulary(rows, {"embedding": torch.zeros(len(characters), 5)}, subwords, characters)
    assert rows["ctc.weight"].eq(7).all()


def test_the_name_of_a_special_symbol_is_not_what_it_writes(subwords):
    class Other(CharTokenizer):
        def piece(self, token):
            return super().piece(token).strip("<>")  # no piece has the name of a special symbol

    origin = Other(["<", "s", "o", ">"])
    known = torch.zeros(len(origin), 5)
    assert exchanged(subwords, origin, embedding=known)["embedding"][: len(SPECIALS)].eq(7).all()
    assert exchanged(CharTokenizer("xyz"), origin, embedding=known)["embedding"].eq(7).all()
