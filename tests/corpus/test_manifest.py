"""Lines of a manifest that nobody wrote on purpose."""

import tarfile

import pytest

from asr.corpus import open_corpus
from tests.corpus.test_corpora import manifest, write


@pytest.fixture
def corpus(tmp_path, tone):
    """Writes a manifest of a good line and the given one, and returns the names of its utterances."""
    write(tmp_path / "a.wav", tone(1.0))

    def names(line: str) -> list[str]:
        good = manifest([{"audio_filepath": "a.wav", "text": "one"}])
        (tmp_path / "m.jsonl").write_text(f"{good.strip()}\n{line}\n")
        return [cut.id for cut in open_corpus(tmp_path / "m.jsonl")]

    return names


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (r'{"audio_filepath": "a.wav", "text": "bad \ud83d", "id": "b"}', "half a character in its text"),
        (r'{"audio_filepath": "a.wav", "text": "x", "speaker": "\ud83d"}', "half a character in its speaker"),
        ('{"audio_filepath": "a.wav", "text": 7}', "text is not a string"),
        ('{"audio_filepath": "a.wav", "text": "x", "offset": 1' + 400 * "0" + "}", "offset must be a number"),
        ('{"audio_filepath": "a.wav", "text": "x", "offset": 1' + 5000 * "0" + "}", "not JSON"),
        (100_000 * "[", "not JSON"),
    ],
    ids=["text", "speaker", "number", "offset", "digits", "brackets"],
)
def test_a_line_that_cannot_be_is_left_out_by_its_number(corpus, caplog, line, fault):
    assert corpus(line) == ["a.wav"]
    assert "line 2" in caplog.text and fault in caplog.text


def test_what_stands_for_a_transcript_where_none_is_needed_is_ignored(tmp_path, tone):
    write(tmp_path / "a.wav", tone(1.0))
    (tmp_path / "m.jsonl").write_text(manifest([{"audio_filepath": "a.wav", "text": ["one"]}]))
    (cut,) = open_corpus(tmp_path / "m.jsonl", transcribed=False)
    assert cut.supervisions[0].text == ""


def test_half_a_character_of_a_text_to_read_is_left_out(tmp_path, caplog):
    (tmp_path / "m.jsonl").write_text('{"source": "ok", "text": "ok"}\n{"source": "\\ud83d", "text": "x"}\n')
    assert len(open_corpus(tmp_path / "m.jsonl")) == 1
    assert "half a character in its source" in caplog.text


def test_hard_links_in_a_tar_are_the_files_that_they_link_to(tmp_path, tone):
    write(tmp_path / "a.wav", tone(1.0))
    (tmp_path / "b.wav").hardlink_to(tmp_path / "a.wav")
    entries = [{"audio_filepath": f"{name}.wav", "text": "one"} for name in "ab"]
    (tmp_path / "manifest.jsonl").write_text(manifest(entries))
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        for name in ("manifest.jsonl", "a.wav", "b.wav"):
            tar.add(tmp_path / name, name)
        assert tar.getmember("b.wav").islnk()
    assert {cut.id: cut.duration for cut in open_corpus(tmp_path / "t.tar")} == {"a.wav": 1.0, "b.wav": 1.0}
