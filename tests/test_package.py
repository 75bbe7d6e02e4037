"""A built wheel works without the checkout: configs and data are inside."""

import os
import subprocess
import sys
import zipfile

import pytest

from asr.resources import resource
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The unpacked wheel, on its own."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


def run(installed, cwd, *arguments) -> str:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_configs_and_data_are_inside(installed, tmp_path):
    code = "from asr.resources import resource; print(resource('data', 'digits', 'train.tar'), resource('conf'))"
    for path in run(installed, tmp_path, "-c", code).split():
        assert path.startswith(str(installed))
        assert os.path.exists(path)


def test_the_commands_run_from_any_directory(installed, tmp_path):
    assert "digits/train.tar" in run(installed, tmp_path, "-m", "asr.train", "--cfg", "job", "--resolve")
    assert "FILE" in run(installed, tmp_path, "-m", "asr.transcribe", "--help")
    assert "corpus" in run(installed, tmp_path, "-m", "asr.evaluate", "--help")


def test_what_ships_is_found_in_a_checkout():
    assert resource("conf", "train.yaml").is_file()
    assert resource("data", "digits", "dev.tar").is_file()


def test_the_digits_keep_their_promises():
    """At most 4 MiB, and no dev voice in training, not even in a blend."""
    from asr.corpus import open_corpus

    tars = [resource("data", "digits", f"{part}.tar") for part in ("train", "dev")]
    assert sum(tar.stat().st_size for tar in tars) <= 4 * 2**20
    train, dev = (
        {voice for cut in open_corpus(tar) for voice in cut.supervisions[0].speaker.split("+")} for tar in tars
    )
    assert len(train) >= 20 and len(dev) == 4
    assert not train & dev
