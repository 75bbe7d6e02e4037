import subprocess
import sys

import pytest
import torch

from asr.average import main
from asr.decode.options import DecodeOptions
from asr.decode.tuning import load_tuning, save_tuning
from asr.model.speech_model import SpeechModel
from tests.conftest import ROOT
from tests.model.test_averaging import another


def test_the_mean_of_models_is_written(tiny_model, tmp_path, capsys):
    models = [tiny_model, another(tiny_model)]
    for i, model in enumerate(models):
        model.save(tmp_path / str(i))
    main([*(str(tmp_path / str(i)) for i in range(2)), "--out", str(tmp_path / "mean")])
    assert capsys.readouterr().out == f"{tmp_path / 'mean'}: the mean of 2 models, in float32\n"
    mean = SpeechModel.load(tmp_path / "mean").state_dict()
    for name, *weights in zip(mean, *(model.state_dict().values() for model in models), strict=True):
        torch.testing.assert_close(mean[name], sum(weights) / 2 if weights[0].is_floating_point() else weights[0])


def test_of_one_model_it_makes_a_copy_in_another_type_with_all_that_was_tuned(tiny_model, tmp_path):
    tiny_model.save(tmp_path / "a")
    save_tuning(tmp_path / "a", DecodeOptions(beam_size=7), language_model=tmp_path / "a")
    main([str(tmp_path / "a"), "--out", str(tmp_path / "small"), "--dtype", "int8"])
    assert load_tuning(tmp_path / "small").options == DecodeOptions(beam_size=7)
    assert load_tuning(tmp_path / "small").language_model == tmp_path / "small" / "lm"
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("small", "a")]
    assert sizes[0] < 0.5 * sizes[1]


def test_what_was_tuned_for_another_model_does_not_stay(tiny_model, tmp_path, capsys):
    tiny_model.save(tmp_path / "a")
    (tmp_path / "b").mkdir()
    save_tuning(tmp_path / "b", DecodeOptions())
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "a"), "--out", str(tmp_path / "b")])
    assert "b already holds a model" in capsys.readouterr().err


def test_no_model_is_written_over(tiny_model, tmp_path, capsys):
    for name in ("a", "b"):
        tiny_model.save(tmp_path / name)
    before = (tmp_path / "b" / "model.safetensors").read_bytes()
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "a"), "--out", str(tmp_path / "b")])
    assert "b already holds a model" in capsys.readouterr().err
    assert (tmp_path / "b" / "model.safetensors").read_bytes() == before


def test_a_file_is_not_taken_for_a_folder(tiny_model, tmp_path, capsys):
    tiny_model.save(tmp_path / "a")
    (tmp_path / "b").touch()
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "a"), "--out", str(tmp_path / "b")])
    assert "b is a file: choose a folder for the model" in capsys.readouterr().err


def test_a_mean_is_not_written_over_what_it_is_of(tiny_model, tmp_path, capsys):
    tiny_model.save(tmp_path / "a")
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path / "a"), "--out", str(tmp_path / "a")])
    assert stop.value.code == 2
    assert "would overwrite what is read" in capsys.readouterr().err


def test_averaging_loads_no_lightning(tiny_model, tmp_path):
    tiny_model.save(tmp_path / "a")
    code = "import sys; from asr.average import main; main(sys.argv[1:]); assert 'lightning' not in sys.modules"
    command = [sys.executable, "-c", code, tmp_path / "a", "--out", tmp_path / "b"]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
