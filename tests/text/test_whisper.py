import base64
import json

import pytest

from asr.text.loading import load_tokenizer
from asr.text.whisper import ENGLISH_TOKENS, TASKS, TIMESTAMPS, WhisperTokenizer

pytest.importorskip("tiktoken")

TOKENS = [bytes([i]) for i in range(256)] + [b"th", b"the", b" the", b"in", b" -"]


@pytest.fixture
def tokenizer() -> WhisperTokenizer:
    return WhisperTokenizer(TOKENS, languages=3)


@pytest.mark.parametrize("text", ["the inn", "Zürich – 日本", "a  b\nc", "it's 42 %"])
def test_text_of_any_script_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == f" {text}"


def test_merges_go_by_rank(tokenizer):
    assert [TOKENS[i] for i in tokenizer.encode("the in")] == [b" the", b" ", b"in"]


def test_words_begin_with_a_space(tokenizer):
    assert tokenizer.words(tokenizer.encode("the in")) == [("the", slice(0, 1)), ("in", slice(1, 3))]


def test_special_tokens_follow_in_whispers_order(tokenizer):
    first = len(TOKENS)
    names = ["endoftext", "startoftranscript", "en", "zh", "de", *TASKS]
    assert tokenizer.special == {name: first + i for i, name in enumerate(names)}
    assert len(tokenizer) == first + len(names) + TIMESTAMPS


def test_the_prompt_names_language_and_task(tokenizer):
    names = {i: name for name, i in tokenizer.special.items()}
    expected = ["startoftranscript", "de", "translate", "notimestamps"]
    assert [names[i] for i in tokenizer.prompt("de", "translate")] == expected
    for language, task in (("fr", "transcribe"), ("de", "sing")):
        with pytest.raises(ValueError, match="knows no"):
            tokenizer.prompt(language, task)


def test_the_models_for_english_alone_are_not_told_a_language():
    tokenizer = WhisperTokenizer([f"{i}".encode() for i in range(50_256)])
    assert len(tokenizer) == 51_864
    assert tokenizer.prompt() == [50_257, 50_362]
    with pytest.raises(ValueError, match="English only"):
        tokenizer.prompt("de")


def test_special_tokens_and_signs_are_suppressed_and_never_written(tokenizer):
    suppressed = tokenizer.suppressed()
    assert set(range(tokenizer.eos + 1, len(tokenizer))) < set(suppressed)
    assert {TOKENS.index(b"("), TOKENS.index(b" -")} < set(suppressed)
    assert TOKENS.index(b"a") not in suppressed
    assert tokenizer.eos not in suppressed
    assert tokenizer.decode([TOKENS.index(b"a"), tokenizer.eos, len(tokenizer) - 1]) == "a"


def test_it_is_read_from_both_kinds_of_files_and_from_ours(tokenizer, tmp_path):
    ranks = "\n".join(f"{base64.b64encode(token).decode()} {i}" for i, token in enumerate(TOKENS))
    (tmp_path / "gpt2.tiktoken").write_text(ranks)
    printable = {" ": "\u0120"}
    ids = {
        "".join(printable.get(c, c) for c in token.decode("latin-1")): i for i, token in enumerate(TOKENS) if i > 255
    }
    from asr.text.whisper import _byte_of_character

    ids |= _byte_of_character()
    (tmp_path / "vocab.json").write_text(json.dumps(ids | {"<|endoftext|>": len(TOKENS)}))
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path) == tokenizer
    for file in ("gpt2.tiktoken", "vocab.json"):
        assert WhisperTokenizer.from_file(tmp_path / file, len(tokenizer)) == tokenizer
        with pytest.raises(ValueError, match="do not fit"):
            WhisperTokenizer.from_file(tmp_path / file, 500)


@pytest.mark.parametrize(("count", "vocab_size"), [(ENGLISH_TOKENS, 51865), (ENGLISH_TOKENS + 1, 51864)])
def test_the_vocabulary_of_the_other_kind_of_model_is_refused(tmp_path, count, vocab_size):
    lines = [f"{base64.b64encode(i.to_bytes(3, 'big')).decode()} {i}" for i in range(count)]
    (tmp_path / "a.tiktoken").write_text("\n".join(lines))
    with pytest.raises(ValueError, match="do not fit a model of"):
        WhisperTokenizer.from_file(tmp_path / "a.tiktoken", vocab_size)
    right = 51864 if count == ENGLISH_TOKENS else 51865
    assert len(WhisperTokenizer.from_file(tmp_path / "a.tiktoken", right)) == right


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.tiktoken", "hello\nworld\n"), ("a.tiktoken", "aGk= x"), ("a.json", '["a"]'), ("a.json", '{"日": 1}')],
    ids=["words", "no rank", "a list", "no bytes"],
)
def test_a_file_of_another_kind_is_named(tmp_path, name, content):
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"/{name}: not a byte-level vocabulary"):
        WhisperTokenizer.from_file(tmp_path / name, 51_864)
