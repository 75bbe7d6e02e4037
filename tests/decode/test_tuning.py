import pytest

from asr.decode import DecodeOptions, Recognizer
from asr.decode.confidence import Calibration
from asr.decode.tuning import load_tuning, save_tuning
from asr.model.folder import ModelError


def test_what_was_tuned_is_the_default_of_the_model(tiny_model, tmp_path):
    tiny_model.save(tmp_path)
    assert load_tuning(tmp_path) == (DecodeOptions(), None)
    tuned = DecodeOptions("rescore", beam_size=4, ctc_weight=0.5), Calibration(1.0, 2.0, 3.0)
    save_tuning(tmp_path, *tuned)
    assert load_tuning(tmp_path) == tuned
    recognizer = Recognizer.load(tmp_path)
    assert (recognizer.options, recognizer.calibration) == tuned
    assert Recognizer.load(tmp_path, options=DecodeOptions("greedy")).options.strategy == "greedy"


@pytest.mark.parametrize("content", ["{", "{}", '{"options": {"beam": 3}, "calibration": null}'])
def test_a_damaged_file_is_a_clear_error(tiny_model, tmp_path, content):
    tiny_model.save(tmp_path)
    (tmp_path / "decoding.json").write_text(content)
    with pytest.raises(ModelError, match=r"decoding\.json"):
        Recognizer.load(tmp_path)
