"""What the import command refuses; tests/model/test_foreign.py tests what it writes."""

import pytest

from tests.test_commands import call


@pytest.mark.parametrize(
    "option", ["--vocabulary v", "--language de", "--task translate", "--timestamps", "--window 10", "--dtype int8"]
)
def test_an_option_of_importing_is_refused_where_it_has_no_effect(tmp_path, option):
    done = call("asr.import_model", "--export", tmp_path, tmp_path / "out", *option.split())
    name = option.split()[0]
    assert done.returncode == 2
    assert done.stderr.decode() == f"asr.import_model: {name} has no effect on --export: leave it out\n"


def test_it_says_what_it_has_written(tmp_path, tiny_model, monkeypatch):
    monkeypatch.setattr("asr.model.foreign.import_model", lambda *source: tiny_model)
    monkeypatch.setattr("asr.model.foreign.export_model", lambda model, folder: None)
    done = call("asr.import_model", "tiny.pt", "ours", "--dtype", "float16", cwd=tmp_path)
    assert done.stdout.decode() == "ours: a model for asr, in float16\n"
    done = call("asr.import_model", "ours", "theirs", "--export", cwd=tmp_path)
    assert done.stdout.decode() == "theirs: a checkpoint for transformers\n"
