import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from asr.decode.confidence import Calibration
from asr.decode.options import DecodeOptions
from asr.decode.quantization import QuantizedLinear
from asr.decode.recognizer import Recognizer
from asr.decode.tuning import load_tuning, save_tuning
from asr.model.folder import ModelError
from asr.model.language_model import LanguageModel, TextModel


def test_what_was_tuned_is_the_default_of_the_model(tiny_model, tmp_path):
    tiny_model.save(tmp_path)
    assert load_tuning(tmp_path) == (None, None, None, False, None)
    tuned = DecodeOptions("rescore", beam_size=4, ctc_weight=0.5), Calibration(1.0, 2.0, 3.0)
    save_tuning(tmp_path, *tuned, piece_seconds=5.0)
    assert load_tuning(tmp_path) == (*tuned, None, False, 5.0)
    assert Recognizer.load(tmp_path).piece_seconds == 5.0
    assert Recognizer.load(tmp_path, piece_seconds=9.0).piece_seconds == 9.0
    recognizer = Recognizer.load(tmp_path)
    assert (recognizer.options, recognizer.calibration) == tuned
    assert Recognizer.load(tmp_path, options=DecodeOptions("greedy")).options.strategy == "greedy"


@pytest.mark.parametrize("is_quick", [True, False])
def test_a_model_tuned_in_whole_numbers_takes_them_where_they_are_quick(tiny_model, tmp_path, monkeypatch, is_quick):
    monkeypatch.setattr("torch.cpu._is_vnni_supported", lambda: is_quick)
    tiny_model.save(tmp_path)
    assert not Recognizer.load(tmp_path).int8
    save_tuning(tmp_path, DecodeOptions(), int8=True)
    for settings, wanted in ({}, True), ({"precision": "float32"}, False):
        recognizer = Recognizer.load(tmp_path, **settings)
        layers = recognizer.model.transformer.modules()
        assert any(isinstance(layer, QuantizedLinear) for layer in layers) == (wanted and is_quick)
        assert recognizer.int8 == wanted  # what a second tuning writes again


def test_a_language_model_lives_in_the_folder_of_its_model(tiny_model, tiny_config, tmp_path):
    tiny_model.save(tmp_path / "asr")
    TextModel(LanguageModel(tiny_config), tiny_model.tokenizer).save(tmp_path / "lm")
    for lm in (tmp_path / "lm", tmp_path / "asr" / "lm", None):  # a second tuning finds it in place, or leaves it there
        save_tuning(tmp_path / "asr", DecodeOptions(lm_weight=0.5), None, lm)
        recognizer = Recognizer.load(tmp_path / "asr")
        assert recognizer.options.lm_weight == 0.5
        assert isinstance(recognizer.language_model, LanguageModel)
    assert Recognizer.load(tmp_path / "asr", language_model=None).language_model is None


@pytest.mark.parametrize("content", ["{", "{}", '{"options": {"beam": 3}, "calibration": null}'])
def test_a_damaged_file_is_a_clear_error(tiny_model, tmp_path, content):
    tiny_model.save(tmp_path)
    (tmp_path / "decoding.json").write_text(content)
    with pytest.raises(ModelError, match=r"decoding\.json"):
        Recognizer.load(tmp_path)


def test_a_folder_without_a_name_is_not_the_model_that_ships(tmp_path, monkeypatch):
    """As of `--model "$MODEL"` where the variable is not set."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="the model folder has no name"):
        Recognizer.load("")


def test_an_option_of_the_search_takes_the_place_of_the_tuned_one_alone(tiny_model, tmp_path):
    tiny_model.save(tmp_path)
    save_tuning(tmp_path, DecodeOptions(beam_size=4, ctc_weight=0.5))
    assert Recognizer.load(tmp_path, nbest=3).options == DecodeOptions(beam_size=4, ctc_weight=0.5, nbest=3)
    assert Recognizer.load(tmp_path, options=DecodeOptions(), nbest=3).options == DecodeOptions(nbest=3)
    with pytest.raises(ValueError, match="nbest must lie between 1 and the beam size, 4"):
        Recognizer.load(tmp_path, nbest=5)


def test_an_option_of_the_search_that_the_model_cannot_have_is_refused(tiny_model, tmp_path):
    tiny_model.transformer.ctc = None
    tiny_model.transformer.config = replace(tiny_model.transformer.config, ctc=False)
    tiny_model.save(tmp_path)
    with pytest.raises(ValueError, match="no CTC head"):
        Recognizer.load(tmp_path, ctc_weight=0.5)


def test_a_full_disk_leaves_what_was_tuned_before(tiny_model, tmp_path, monkeypatch):
    save_tuning(tmp_path, DecodeOptions(beam_size=6))
    before = load_tuning(tmp_path)

    def full(self, *_, **__):
        self.write_bytes(b"{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        save_tuning(tmp_path, DecodeOptions(beam_size=3))
    assert load_tuning(tmp_path) == before


def test_numbers_of_numpy_are_numbers(tmp_path):
    save_tuning(tmp_path, DecodeOptions(beam_size=np.int64(5), ctc_weight=np.float32(0.5)), piece_seconds=np.float64(5))
    tuned = load_tuning(tmp_path)
    assert tuned.options == DecodeOptions(beam_size=5, ctc_weight=0.5) and tuned.piece_seconds == 5.0


@pytest.mark.parametrize(
    "change",
    [{"piece_seconds": "long"}, {"calibration": {"mean": 1, "least": None, "bias": 1}}, {"calibration": [0.1, 1, 1]}],
)
def test_what_is_no_number_is_found_when_it_is_loaded(tmp_path, change):
    save_tuning(tmp_path, DecodeOptions())
    path = tmp_path / "decoding.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match="decoding.json: not a tuning"):
        load_tuning(tmp_path)


def test_an_option_that_is_given_replaces_a_tuned_one_that_cannot_be(tiny_model, tiny_config, tmp_path):
    tiny_model.save(tmp_path)
    TextModel(LanguageModel(tiny_config), tiny_model.tokenizer).save(tmp_path / "lm")
    save_tuning(tmp_path, DecodeOptions(lm_weight=0.5, ilm_weight=0.2))
    with pytest.raises(ValueError, match="no bigram"):
        Recognizer.load(tmp_path)
    assert Recognizer.load(tmp_path, ilm_weight=0.0).options == DecodeOptions(lm_weight=0.5)
