import errno
import gzip
import multiprocessing
import os
import threading
from pathlib import Path

import lhotse
import numpy as np
import pytest
import soundfile

import asr.audio._torchaudio  # noqa: F401 (Lhotse's own reading needs it)
from asr.audio.reading import SAMPLE_RATE, AudioError
from asr.corpus import Utterance, iterate, make_cuts, open_corpus, read_cut
from asr.corpus.__main__ import main
from asr.corpus.shards import write_shards
from tests.corpus.test_librispeech import Server


@pytest.fixture
def cuts(tmp_path):
    """Seven utterances of noise in files of increasing length, one of them a part of its file."""
    rng = np.random.default_rng(0)
    utterances = []
    for i in range(7):
        path = tmp_path / f"{i}.wav"
        soundfile.write(path, rng.normal(0, 0.1, SAMPLE_RATE + 1000 * i), SAMPLE_RATE)
        utterances.append(Utterance(f"chapter/u{i}.x", path, f"TEXT {i}", speaker=f"s{i % 2}"))
    utterances[3].offset, utterances[3].duration = 0.5, 0.25
    return make_cuts(utterances, "noise")


def same(cuts, others) -> bool:
    """Whether ids, texts, speakers and every sample are the same."""
    pairs = list(zip(iterate(cuts), iterate(others), strict=True))
    said = [(a.id, *vars_of(a)) == (b.id, *vars_of(b)) for (a, _), (b, _) in pairs]
    return all(said) and all(np.array_equal(x, y) for (_, x), (_, y) in pairs)


def vars_of(cut) -> tuple:
    supervision = cut.supervisions[0]
    return supervision.text, supervision.speaker, cut.duration


def test_shards_hold_what_the_files_held(cuts, tmp_path):
    written = write_shards(cuts, tmp_path / "shards", size=3)
    assert len(list((tmp_path / "shards").rglob("recording.*.tar"))) == 3
    assert len(written) == 7
    assert same(cuts, open_corpus(tmp_path / "shards"))


def test_samples_beyond_the_full_scale_are_not_clipped(tmp_path):
    loud = 1000 * np.random.default_rng(0).normal(0, 1, SAMPLE_RATE).astype(np.float32)
    soundfile.write(tmp_path / "loud.wav", loud, SAMPLE_RATE, subtype="FLOAT")
    cuts = make_cuts([Utterance("loud", tmp_path / "loud.wav", "LOUD")], "loud")
    ((_, samples),) = iterate(write_shards(cuts, tmp_path / "shards", size=1))
    assert np.abs(samples - loud / np.abs(loud).max()).max() < 1e-4


def test_they_are_lhotses_shards(cuts, tmp_path):
    write_shards(cuts, tmp_path / "shards", size=3)
    read = list(lhotse.CutSet.from_shar(in_dir=tmp_path / "shards" / "shar"))
    for cut, original in zip(read, cuts, strict=True):
        assert vars_of(cut) == vars_of(original)
        np.testing.assert_array_equal(cut.load_audio()[0], read_cut(original))


@pytest.mark.parametrize("inside", ["", "shar"])
def test_their_cuts_are_found_from_any_directory(cuts, tmp_path, monkeypatch, inside):
    write_shards(cuts, tmp_path / "shards", size=3)
    monkeypatch.chdir(tmp_path)
    read = open_corpus(Path("shards") / inside)
    monkeypatch.chdir("/")
    assert same(cuts, read)


def test_lhotses_own_shards_are_read_too(cuts, tmp_path):
    (tmp_path / "theirs").mkdir()
    cuts.to_shar(tmp_path / "theirs", fields={"recording": "flac"}, shard_size=4)
    assert same(cuts, open_corpus(tmp_path / "theirs"))


def test_lists_of_cuts_beside_shards_are_none_of_them(cuts, tmp_path):
    write_shards(cuts, tmp_path / "shards", size=4)
    shar = tmp_path / "shards" / "shar"
    (shar / "cuts.aligned.jsonl.gz").write_bytes((shar / "cuts.000000.jsonl.gz").read_bytes())
    assert len(open_corpus(shar)) == 7


def test_what_users_know_of_a_cut_is_kept_and_where_it_was_is_not(cuts, tmp_path):
    for cut in cuts:
        cut.custom = {"room": "kitchen"}
    write_shards(cuts, tmp_path / "one", size=3)
    write_shards(open_corpus(tmp_path / "one"), tmp_path / "two", size=7)
    again = open_corpus(tmp_path / "two")
    assert same(cuts, again)
    assert {cut.custom["room"] for cut in again} == {"kitchen"}
    assert {cut.custom["shard"] for cut in again} == {str(tmp_path / "two" / "shar" / "recording.000000.tar")}


@pytest.fixture
def server():
    server = Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_shards_are_read_by_url(cuts, tmp_path, server):
    write_shards(cuts, tmp_path / "shards", size=3)
    for path in (tmp_path / "shards").rglob("*.*"):
        server.files[f"/my/{path.relative_to(tmp_path)}"] = path.read_bytes()
    opened = open_corpus([f"{server.url}/my/shards/"])
    assert same(cuts, opened)
    last = opened[-1].custom["shard"].removeprefix(server.url)
    del server.files[last]
    assert len(list(iterate(opened))) == 6  # what cannot be read is left out, by name
    with pytest.raises(AudioError, match=f"{last}: no such file"):
        read_cut(opened[-1])


def test_workers_read_by_url_what_their_parent_opened(cuts, tmp_path, server):
    write_shards(cuts, tmp_path / "shards", size=3)
    for path in (tmp_path / "shards").rglob("*.*"):
        server.files[f"/{path.relative_to(tmp_path)}"] = path.read_bytes()
    opened = open_corpus(f"{server.url}/shards")
    with multiprocessing.get_context("fork").Pool(2) as pool:
        sounds = pool.map_async(read_cut, list(opened)).get(timeout=30)
    for cut, sound in zip(cuts, sounds, strict=True):
        np.testing.assert_array_equal(sound, read_cut(cut))


@pytest.mark.parametrize(
    "content", [None, b"no gzip", *(gzip.compress(b, mtime=0) for b in (b"no JSON", b"{}", b"[1]"))]
)
def test_a_url_without_an_index_is_one_line(server, content):
    if content:
        server.files["/index.jsonl.gz"] = content
    with pytest.raises(ValueError, match=r"/index\.jsonl\.gz: cannot be read"):
        open_corpus(server.url)


@pytest.mark.parametrize("failures", [2, 9])
def test_a_server_in_trouble_is_asked_again_and_then_given_up(cuts, tmp_path, server, monkeypatch, failures):
    monkeypatch.setattr("asr.corpus.utterances.PATIENCE", 0.01)
    [cut, *_] = write_shards(cuts, tmp_path / "shards", size=7)
    server.files["/recording.tar"] = (tmp_path / "shards" / "shar" / "recording.000000.tar").read_bytes()
    cut.recording.sources[0].source = f"{server.url}/recording.tar"
    server.failures = failures  # error 503 and broken connections in turn
    if failures < 3:  # after a broken connection, aiohttp itself asks once more
        np.testing.assert_array_equal(read_cut(cut), read_cut(cuts[0]))
    else:
        assert not list(iterate([cut]))  # left out, by name


@pytest.mark.parametrize(
    ("name", "content"),
    [("cuts.000000.jsonl.gz", None), ("recording.000000.tar", b"no tar"), ("recording.000001.tar", None)],
)
def test_damaged_shards_are_one_line(cuts, tmp_path, name, content):
    write_shards(cuts, tmp_path / "shards", size=4)
    path = tmp_path / "shards" / "shar" / name
    path.write_bytes(content) if content else path.unlink()
    with pytest.raises(ValueError, match=f"{name}: cannot be read"):
        open_corpus(path.parent)


def test_shards_that_were_not_finished_are_written_anew(cuts, tmp_path):
    def broken():
        yield from cuts[:4]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shards(broken(), tmp_path / "shards", size=3)
    assert not (tmp_path / "shards" / "shar").exists()
    assert len(write_shards(cuts, tmp_path / "shards", size=3)) == 7
    assert [path.name for path in (tmp_path / "shards").glob("shar*")] == ["shar"]


def test_shards_whose_index_could_not_be_written_are_written_anew(cuts, tmp_path, monkeypatch):
    def full(self, path):
        path.write_bytes(b"a part")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(OSError, match=r"index\.jsonl\.gz"):
        patch.setattr(lhotse.CutSet, "to_file", full)
        write_shards(cuts, tmp_path / "shards", size=3)
    assert not (tmp_path / "shards" / "index.jsonl.gz").exists()  # an index says that there are shards
    assert len(write_shards(cuts, tmp_path / "shards", size=3)) == 7


def test_shards_hold_nothing_but_sound(cuts, tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((20, 8), np.float32))
    cuts[1].recording, cuts[1].custom = None, {"matrix": str(tmp_path / "a.npy"), "width": 8}
    with pytest.raises(ValueError, match=r"chapter/u1\.x: shards hold sound, and this is matrix"):
        write_shards(cuts, tmp_path / "shards", size=3)


def test_no_shards_are_made_of_what_cannot_be_read(cuts, tmp_path):
    for file in tmp_path.glob("*.wav"):
        file.write_bytes(b"")
    with pytest.raises(ValueError, match="shards: no utterance could be read"):
        write_shards(cuts, tmp_path / "shards", size=3)
    assert not (tmp_path / "shards" / "shar").exists()


def test_nothing_is_written_of_a_corpus_that_is_not_all_sound(cuts, tmp_path):
    cuts[6].recording, cuts[6].custom = None, {"source": "one"}
    with pytest.raises(ValueError, match="chapter/u6.x: shards hold sound, and this is text"):
        write_shards(cuts, tmp_path / "shards", size=3)
    assert not (tmp_path / "shards").exists()


def test_an_utterance_beyond_its_file_is_left_out(cuts, caplog):
    cuts[1].start = 5.0
    assert len(list(iterate(cuts))) == 6
    assert "chapter/u1.x" in caplog.text and "no sound in it" in caplog.text


def test_a_server_that_sends_whole_files_is_refused(cuts, tmp_path, server, monkeypatch):
    write_shards(cuts, tmp_path / "shards", size=7)
    [cut, *_] = open_corpus(tmp_path / "shards")
    path = tmp_path / "shards" / "shar" / "recording.000000.tar"
    server.files["/recording.tar"] = path.read_bytes()
    cut.recording.sources[0].source = f"{server.url}/recording.tar"
    monkeypatch.setattr("tests.corpus.test_librispeech.Handler.parts", False)
    with pytest.raises(AudioError, match="does not support range requests"):
        read_cut(cut)
    for file in (tmp_path / "shards").rglob("*.*"):
        server.files[f"/{file.relative_to(tmp_path / 'shards')}"] = file.read_bytes()
    with pytest.raises(ValueError, match="does not support range requests"):  # before any training on it
        open_corpus(server.url)


def test_unreadable_sound_is_left_out(cuts, tmp_path, caplog):
    (tmp_path / "2.wav").write_bytes(b"")
    assert len(write_shards(cuts, tmp_path / "shards", size=3)) == 6
    assert "chapter/u2.x" in caplog.text


def test_shards_that_are_there_are_not_overwritten(cuts, tmp_path):
    write_shards(cuts, tmp_path / "shards", size=3)
    with pytest.raises(ValueError, match="is there already"):
        write_shards(cuts, tmp_path / "shards", size=3)


def test_a_tar_that_lacks_a_sound_is_named(cuts, tmp_path):
    write_shards(cuts, tmp_path / "shards", size=3)
    shar = tmp_path / "shards" / "shar"
    (shar / "recording.000001.tar").write_bytes((shar / "recording.000000.tar").read_bytes())
    with pytest.raises(ValueError, match=r"recording\.000001\.tar: the sound of chapter/u3.x is not in it"):
        open_corpus(shar)


def test_a_cut_that_never_had_a_sound_is_named(cuts, tmp_path):
    (tmp_path / "shards").mkdir()
    silent = lhotse.utils.fastcopy(cuts[1], recording=None)
    lhotse.CutSet.from_cuts([cuts[0], silent]).to_shar(tmp_path / "shards", fields={"recording": "flac"}, shard_size=2)
    with pytest.raises(ValueError, match=r"the sound of chapter/u1.x is not in it"):
        open_corpus(tmp_path / "shards")


def test_on_the_command_line(cuts, tmp_path, monkeypatch, capsys):
    cuts.to_file(tmp_path / "cuts.jsonl.gz")
    arguments = ["shard", str(tmp_path / "cuts.jsonl.gz"), "--out", str(tmp_path / "shards"), "--size"]
    monkeypatch.setattr("sys.argv", ["asr.corpus", *arguments, "0"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "--size" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["asr.corpus", *arguments, "2"])
    main()
    assert "7 utterances" in capsys.readouterr().out
    assert len(list((tmp_path / "shards" / "shar").glob("*.tar"))) == 4
