import pytest

from asr.text.tokenizer import CharTokenizer, SubwordTokenizer
from asr.text.whisper import WhisperTokenizer
from asr.text.words import as_written, begins_word, is_unspaced, join_words, split_words

WEATHER = "今日はいい天気。"


@pytest.mark.parametrize(("character", "unspaced"), [("天", 1), ("は", 1), ("ア", 1), ("ก", 1), ("한", 0), ("a", 0)])
def test_scripts_that_are_written_without_spaces(character, unspaced):
    assert is_unspaced(character) == bool(unspaced)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("all of you", ["all", "of", "you"]),
        ("他说 你好", ["他", "说", "你", "好"]),
        ("我用iPhone15吗", ["我", "用", "iPhone15", "吗"]),
        ("他说：「是。」ok", ["他", "说：", "「是。」", "ok"]),
        ("ラーメン", ["ラー", "メ", "ン"]),  # a mark that lengthens a vowel belongs to its letter
        ("น้ำ", ["น้", "ำ"]),  # and so does a tone mark
        ("안녕 하세요", ["안녕", "하세요"]),
        ("", []),
    ],
)
def test_words_begin_after_a_space_and_at_every_letter_of_such_a_script(text, words):
    assert split_words(text) == words
    assert join_words(words).replace(" ", "") == text.replace(" ", "")


def test_words_are_joined_as_their_scripts_are_written():
    assert join_words(["all", "", "of", "you"]) == "all of you"
    assert join_words(["今", "日", "ok", "go", "天。", "気"]) == "今日ok go天。気"


def test_what_ends_in_dots_has_its_space():
    assert join_words(["well…", "maybe"]) == "well… maybe"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["hello", "w\ufffdrld"], "hello wörld"),
        (["\ufffd", "x", "\ufffd\ufffd"], "ö x üä"),
        (["a\ufffd"], "aöü"),  # a subword tokenizer has one mark for all letters that it lacks
        (["你\ufffd", "吗"], "你龘吗"),
    ],
)
def test_letters_that_no_token_writes_are_those_of_the_text(words, text):
    assert join_words(as_written(words, text)) == text


def test_a_space_that_the_vocabulary_lacks_is_of_no_word():
    assert as_written(["他\ufffd", "好"], "他 好") == ["他", "好"]


def test_one_token_for_several_letters_goes_past_no_space():
    words, text = ["black", "\ufffd", "\ufffd", "was"], "black жук мир was"
    assert as_written(words, text) == text.split()
    many = "éa " * 200 + "zz"
    assert as_written(["\ufffda"] * 200 + ["zz"], many) == many.split()


def test_words_of_another_text_stay():
    assert as_written(["a\ufffd", "b"], "c d") == ["a\ufffd", "b"]


def test_tokens_of_several_letters_are_words_as_they_are():
    assert begins_word("天気", "は") and begins_word("\u2581天気", "a") and not begins_word("。", "気")


@pytest.mark.parametrize("kind", ["characters", "subwords", "bytes"])
def test_every_tokenizer_finds_words_of_such_scripts(kind):
    if kind == "characters":
        tokenizer = CharTokenizer.train([WEATHER])
    elif kind == "subwords":
        tokenizer = SubwordTokenizer.train([WEATHER, "天気", "天気"], 17)
    else:
        tokenizer = WhisperTokenizer([letter.encode() for letter in dict.fromkeys(WEATHER)])
    ids = [tokenizer.tokens.index(c.encode()) for c in WEATHER] if kind == "bytes" else tokenizer.encode(WEATHER)
    words = tokenizer.words(ids)
    assert "".join(word for word, _ in words) == WEATHER
    assert words[-1][0][-2:] == "気。" and len(words) >= 4
    assert [i for _, part in words for i in ids[part]] == ids


def test_what_is_written_by_its_bytes_is_not_torn():
    tokenizer = WhisperTokenizer([bytes([byte]) for byte in range(256)])
    assert tokenizer.words(list("日本".encode())) == [("日本", slice(0, 6))]
