"""What the export command refuses; tests/decode/test_onnx.py tests what it writes."""

import sys

import pytest

from asr.decode import onnx
from tests.test_commands import call


def test_nothing_is_written_over(tmp_path):
    mine = tmp_path / "characters.json"
    mine.write_text("mine")
    for out, said in ((tmp_path, "is not empty"), (mine, "Not a directory")):
        done = call("asr.export", out)
        assert done.returncode == 2 and said in done.stderr.decode() and done.stderr.count(b"\n") == 1
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("missing", ["onnxruntime", "onnxscript"])
def test_without_its_libraries_it_says_what_to_install(tmp_path, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    done = call("asr.export", tmp_path)
    assert done.returncode == 2 and f"{missing} is missing: pip install '.[onnx]'" in done.stderr.decode()


def test_graphs_that_are_wrong_are_no_users_mistake(tmp_path, monkeypatch):
    def wrong(recognizer, folder, int8):
        raise onnx.ExportError("differ by 1")

    monkeypatch.setattr(onnx, "export_onnx", wrong)
    done = call("asr.export", tmp_path)
    assert done.returncode == 1 and done.stderr == b"asr.export: differ by 1\n"


def test_one_that_was_killed_does_not_stand_in_the_way_of_the_next(tmp_path, monkeypatch):
    def interrupted(recognizer, folder):
        assert not list(folder.iterdir())
        raise KeyboardInterrupt

    (tmp_path / onnx.UNFINISHED / "graph").mkdir(parents=True)
    monkeypatch.setattr(onnx, "_write_graphs", interrupted)
    assert call("asr.export", tmp_path).returncode == 130 and not list(tmp_path.iterdir())
