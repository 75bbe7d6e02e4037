"""What the import command refuses; tests/model/test_foreign.py tests what it writes."""

import pytest

from tests.test_commands import call


@pytest.mark.parametrize("option", ["--vocabulary v", "--language de", "--timestamps", "--window 10", "--dtype int8"])
def test_an_option_of_importing_is_refused_where_it_has_no_effect(tmp_path, option):
    done = call("asr.import_model", "--export", tmp_path, tmp_path / "out", *option.split())
    name = option.split()[0]
    assert done.returncode == 2
    assert done.stderr.decode() == f"asr.import_model: {name} has no effect on --export: leave it out\n"
