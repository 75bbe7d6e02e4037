import gzip
import lzma
from itertools import chain, pairwise

import numpy as np
import pytest
import soundfile

from asr.audio.reading import SAMPLE_RATE
from asr.text.normalizer import english, get_normalizer
from asr.text.tokenizer import CharTokenizer
from asr.training.config import TextConfig
from asr.training.text import Batches, Lines, TextData, TextDataset, lines_of
from tests.conftest import LETTERS

LENS = np.random.default_rng(0).integers(1, 40, 500)


def test_every_line_comes_once_an_epoch_in_batches_of_the_size_asked_for():
    batches = Batches(LENS, 200, seed=1)
    for epoch in range(2):
        batches.set_epoch(epoch)
        found = list(batches)
        assert sorted(i for batch in found for i in batch) == list(range(500))
        assert all(len(batch) * (max(LENS[i] for i in batch) + 1) <= 200 for batch in found)


def test_epochs_differ_and_a_seed_repeats_them():
    first, again, second = (Batches(LENS, 200, seed=1) for _ in range(3))
    second.set_epoch(1)
    assert list(first) == list(again) != list(second)
    longest = [max(LENS[i] for i in batch) for batch in first]
    assert longest != sorted(longest)


@pytest.mark.parametrize("seed", [1, None])
def test_padding_is_little(seed):
    found = list(Batches(LENS, 400, seed))
    padded = sum(len(batch) * (max(LENS[i] for i in batch) + 1) for batch in found)
    assert padded < 1.1 * sum(LENS + 1)


def test_processes_share_the_batches():
    whole = list(Batches(LENS, 200, 1))
    parts = [list(Batches(LENS, 200, 1, rank, 3)) for rank in range(3)]
    assert len({len(part) for part in parts}) == 1
    shared = [batch for group in zip(*parts, strict=True) for batch in group]
    assert shared == whole[: len(shared)] and len(whole) - len(shared) < 3


def test_processes_share_all_of_a_dev_set_however_few_its_batches_are():
    for world_size in (3, 100):
        parts = [list(Batches(LENS, 2000, None, rank, world_size)) for rank in range(world_size)]
        assert len({len(part) for part in parts}) == 1
        assert sorted(i for part in parts for batch in part for i in batch) == list(range(500))
    assert [tensor.numel() for tensor in TextDataset([])[[], 0]] == [0, 0]


@pytest.mark.parametrize("vocab_size", [2**16, 2**16 + 1])
def test_lines_are_kept_as_they_were_added(vocab_size):
    lines = Lines(vocab_size)
    for line in ([0, vocab_size - 1], [], [1]):
        lines.append(line)
    assert [line.tolist() for line in lines] == [[0, vocab_size - 1], [], [1]]
    assert lines.lens.tolist() == [2, 0, 1]
    Y, Y_lens = TextDataset(lines)[[0, 2], 7]
    assert Y.tolist() == [[0, vocab_size - 1], [1, 0]] and Y_lens.tolist() == [2, 1]


def test_an_update_of_several_processes_has_as_many_tokens_as_that_of_one(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"{'a' * (i % 30)} b\n" for i in range(2000)))
    config = TextConfig(train=[str(tmp_path / "a.txt")], held_out=30, max_tokens=50, batch_tokens=600)
    data = TextData(config, CharTokenizer(LETTERS), english, seed=1)
    assert data.updates_per_epoch(1) == len(list(Batches(data.train_lines.lens, 600, seed=1)))
    assert data.updates_per_epoch(3) == pytest.approx(data.updates_per_epoch(1), rel=0.1)


@pytest.mark.parametrize(("name", "opener"), [("a.txt", open), ("a.txt.gz", gzip.open), ("a.txt.xz", lzma.open)])
def test_lines_are_normalised_and_those_without_text_or_too_long_left_out(tmp_path, name, opener):
    with opener(tmp_path / name, "wt") as file:
        file.write("One, two!\n\n...\nThree 4\n" + "long " * 50 + "\n")
    tokenizer = CharTokenizer(LETTERS)
    config = TextConfig(train=[str(tmp_path / name)], dev=[str(tmp_path / name)])
    data = TextData(config, tokenizer, english, seed=1)
    assert [tokenizer.decode(line.tolist()) for line in data.dev_lines] == ["one two", "three four"]
    assert data.tokens == 19


def test_the_mark_with_which_some_editors_begin_a_file_is_not_of_its_first_line(tmp_path):
    (tmp_path / "a.txt").write_text("a b\nc\n", encoding="utf-8-sig")
    assert list(lines_of([str(tmp_path / "a.txt")])) == ["a b\n", "c\n"]


def test_lines_for_which_the_model_has_no_positions_are_left_out(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("".join(f"{'a' * i}\n" for i in range(1, 31)))
    config = TextConfig(train=[str(tmp_path / "a.txt")], dev=[str(tmp_path / "a.txt")])
    data = TextData(config, CharTokenizer(LETTERS), english, seed=1, longest=20)
    assert max(map(len, data.train_lines)) == max(map(len, data.dev_lines)) == 20
    assert "10 of 30 lines have more than the 20 tokens that model.max_positions has room for" in caplog.text


def test_dev_lines_are_held_out_of_training(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"{'a' * i} b\n" for i in range(1, 101)))
    data = TextData(TextConfig(train=[str(tmp_path / "a.txt")], held_out=30), CharTokenizer(LETTERS), english, seed=1)
    lengths = [{len(line) for line in lines} for lines in (data.train_lines, data.dev_lines)]
    assert [len(x) for x in lengths] == [70, 30] and not lengths[0] & lengths[1]


@pytest.mark.parametrize(("lines", "held_out"), [(2, 1), (9, 4), (60, 10), (500, 50), (30_000, 2000)])
def test_unless_asked_for_a_tenth_of_a_text_is_held_out_or_ten_lines(tmp_path, lines, held_out):
    (tmp_path / "a.txt").write_text("a b\n" * lines)
    data = TextData(TextConfig(train=[str(tmp_path / "a.txt")]), CharTokenizer(LETTERS), english, seed=1)
    assert (len(data.train_lines), len(data.dev_lines)) == (lines - held_out, held_out)


def test_lines_go_on_with_the_next_as_often_as_asked_for_and_as_far_as_they_fit(tmp_path):
    text = "".join(f"{word}.\n" for word in ["ab", "cde", "f"] * 200)
    (tmp_path / "a.txt").write_text(text)
    tokenizer = CharTokenizer(LETTERS)

    def read(joined, most=200):
        config = TextConfig(train=[str(tmp_path / "a.txt")], dev=[str(tmp_path / "a.txt")], joined=joined)
        return TextData(config, tokenizer, english, seed=1, longest=most)

    apart, together, short = read(0.0), read(0.4), read(0.9, most=10)
    assert [len(data.train_lines) for data in (apart, together)] == [600, pytest.approx(360, abs=40)]
    for data in (together, short):
        words = [word for line in data.train_lines for word in tokenizer.decode(line.tolist()).split()]
        assert words == ["ab", "cde", "f"] * 200
    assert max(map(len, short.train_lines)) == 10  # ab, cde and f, or f, ab and cde
    assert len(together.dev_lines) == 600


def test_transcripts_of_corpora_are_lines_as_often_as_named_and_none_is_held_out(tmp_path, tone):
    soundfile.write(tmp_path / "a.wav", tone(), SAMPLE_RATE)
    (tmp_path / "a.txt").write_text("A B C!\n")
    (tmp_path / "text.txt").write_text("d\n" * 40)
    tokenizer = CharTokenizer(LETTERS)
    config = TextConfig(train=[str(tmp_path / "text.txt")], transcripts=[str(tmp_path)] * 2, joined=0.5, held_out=4)
    data = TextData(config, tokenizer, english, seed=1)
    lines = [tokenizer.decode(line.tolist()) for line in data.train_lines]
    assert lines.count("a b c") == 2
    assert len(data.dev_lines) == 4 and "a b c" not in [tokenizer.decode(line.tolist()) for line in data.dev_lines]


def test_what_is_held_out_is_single_lines_and_stays_so_where_others_come(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"{'a' * (i % 20)} {'b' * (i // 20)} c\n" for i in range(100)))
    (tmp_path / "b.txt").write_text("d e\nf\n")
    held = []
    for names, joined in ((["a.txt"], 0.0), (["a.txt"], 0.5), (["a.txt", "b.txt"], 0.5)):
        config = TextConfig(train=[str(tmp_path / name) for name in names], held_out=20, joined=joined)
        data = TextData(config, CharTokenizer(LETTERS), english, seed=1)
        held.append({tuple(line.tolist()) for line in data.dev_lines})
    assert held[0] == held[1] and len(held[1] & held[2]) >= 18


def test_lines_are_joined_in_their_order_whatever_is_held_out(tmp_path):
    names = ["".join("abcdefghij"[int(digit)] for digit in f"{i:03d}") for i in range(600)]
    (tmp_path / "a.txt").write_text("".join(f"{name}\n" for name in names))
    tokenizer = CharTokenizer(LETTERS)
    config = TextConfig(train=[str(tmp_path / "a.txt")], held_out=30, joined=0.5)
    data = TextData(config, tokenizer, english, seed=1)
    lines = [tokenizer.decode(line.tolist()).split() for line in data.train_lines]
    held_out = [tokenizer.decode(line.tolist()) for line in data.dev_lines]
    assert len(held_out) == 30 and sorted([*held_out, *chain(*lines)]) == names
    steps = [names.index(b) - names.index(a) for line in lines for a, b in pairwise(line)]
    assert len(steps) > 150 and min(steps) > 0
    assert sum(step == 1 for step in steps) > 0.8 * len(steps)


def test_characters_that_the_tokenizer_cannot_write_are_told(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("a\n" * 20 + "é\n" * 3)
    config = TextConfig(train=[str(tmp_path / "a.txt")], dev=[str(tmp_path / "a.txt")])
    TextData(config, CharTokenizer(LETTERS), get_normalizer("neutral"), seed=1)
    assert "3 of 23 lines have characters that the tokenizer cannot write, as in 'é'" in caplog.text


def test_a_text_of_one_line_cannot_be_held_out(tmp_path):
    (tmp_path / "a.txt").write_text("one\n")
    with pytest.raises(ValueError, match=r"too few lines for one to be held out: data\.dev"):
        TextData(TextConfig(train=[str(tmp_path / "a.txt")]), CharTokenizer(LETTERS), english, seed=1)


@pytest.mark.parametrize("name", ["train.jsonl", "cuts.jsonl.gz"])
def test_a_corpus_is_no_text(tmp_path, name):
    (tmp_path / name).write_text('{"audio_filepath": "a.wav", "text": "one"}\n')
    with pytest.raises(ValueError, match=f"{name} is a corpus: its transcripts are for data.transcripts"):
        TextData(TextConfig(train=[str(tmp_path / name)]), CharTokenizer(LETTERS), english, seed=1)


def test_a_text_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "a.xz").write_bytes(b"no archive")
    for name in ("a.xz", "nowhere.txt"):
        with pytest.raises(ValueError, match=name):
            TextData(TextConfig(train=[str(tmp_path / name)]), CharTokenizer(LETTERS), english, seed=1)
