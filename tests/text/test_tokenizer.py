import pytest

from asr.text.loading import load_tokenizer
from asr.text.tokenizer import BLANK, EOS, SOS, UNK, CharTokenizer, SubwordTokenizer

TEXTS = ["the cat sat on the mat", "a dog's day", "他说 你好"] * 20


@pytest.fixture(params=["char", "bpe", "unigram"])
def tokenizer(request):
    if request.param == "char":
        return CharTokenizer.train(TEXTS)
    return SubwordTokenizer.train(TEXTS, 45 if request.param == "bpe" else 25, request.param)


def test_decoding_inverts_encoding(tokenizer):
    for text in TEXTS[:3]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_symbols_have_the_same_ids_everywhere(tokenizer):
    assert (BLANK, UNK, SOS, EOS) == (0, 1, 2, 3)
    ids = tokenizer.encode("the cat")
    assert min(ids) > EOS and max(ids) < len(tokenizer)
    assert tokenizer.decode([SOS, *ids, BLANK, EOS]) == "the cat"


def test_pieces_spell_what_is_encoded_and_name_what_is_special(tokenizer):
    pieces = [tokenizer.piece(i) for i in tokenizer.encode("the cat")]
    assert "".join(pieces).lstrip("\u2581") == "the\u2581cat"
    assert [tokenizer.piece(i) for i in range(4)] == ["<blank>", "<unk>", "<sos>", "<eos>"]


def test_words_and_the_tokens_that_write_them(tokenizer):
    ids = tokenizer.encode("a dog's day")
    words = tokenizer.words(ids)
    assert [word for word, _ in words] == ["a", "dog's", "day"]
    assert [i for _, part in words for i in ids[part]] == ids
    assert tokenizer.words([]) == []


def test_tokenizers_are_equal_where_they_write_alike(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path) == tokenizer
    assert CharTokenizer("abc") != tokenizer


def test_what_is_not_in_the_vocabulary_is_unknown(tokenizer):
    assert UNK in tokenizer.encode("caté")
    assert "\ufffd" in tokenizer.decode(tokenizer.encode("caté"))


def test_a_tokenizer_travels_in_a_folder(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert len(loaded) == len(tokenizer)
    assert loaded.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])


def test_a_folder_without_tokenizer_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="no tokenizer"):
        load_tokenizer(tmp_path)


def test_too_large_a_vocabulary_is_a_clear_error():
    with pytest.raises(ValueError, match="tokenizer.vocab_size=5000"):
        SubwordTokenizer.train(TEXTS, 5000)


def test_letters_of_long_texts_are_in_the_vocabulary():
    long = " ".join(["the cat sat"] * 500) + " caté"
    assert UNK not in SubwordTokenizer.train([*TEXTS, long], 45).encode("é")
