"""Models as ONNX graphs, and the program of docs/onnx.md that runs them."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import soundfile
import torch

import asr
from asr import export
from asr.audio.reading import SAMPLE_RATE, read_audio
from asr.decode import onnx
from asr.decode.alignment import frame_times
from asr.decode.recognizer import Recognizer
from asr.resources import resource
from tests.conftest import ROOT
from tests.decode.test_graphs import of_kind
from tests.decode.test_recognizer import noise

pytest.importorskip("onnxruntime")
PROGRAM = re.search(
    r"```python\n(import json.*?)```", (ROOT / "docs" / "onnx.md").read_text(encoding="utf-8"), re.DOTALL
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A recogniser that hears something in noise, and the folder of its graphs."""
    folder = tmp_path_factory.mktemp("onnx")
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        for module in ("graphs", "onnx"):
            patch.setattr(f"asr.decode.{module}.hears_something", lambda log_probs, lens: lens > 0)
        of_kind("of everything", layers=1).model.save(folder / "model")
        export.main([str(folder / "graphs"), "--model", str(folder / "model")])
    alone = {"strategy": "greedy", "max_repeats": 1000, "fallback": ()}  # as the graphs are used
    return asr.load(folder / "model", precision="float32", **alone), folder / "graphs"


def test_the_program_of_the_docs_writes_what_a_greedy_search_does(
    exported, noise_is_heard, tmp_path, monkeypatch, capsys
):
    recognizer, folder = exported
    sounds = {tmp_path / f"{seconds}.wav": noise(seconds) for seconds in (0.05, 0.3, 2.9)}
    for path, sound in sounds.items():
        soundfile.write(path, sound, SAMPLE_RATE, subtype="FLOAT")
    monkeypatch.setattr(sys, "argv", ["program", str(folder), *map(str, sounds)])
    exec(PROGRAM[1], {})
    written = capsys.readouterr().out.splitlines()
    assert written == [recognizer.transcribe(path).text for path in sounds]
    assert written[2]


def test_a_search_finds_in_the_folder_what_it_needs(exported):
    recognizer, folder = exported
    files = {"encoder.onnx", "decoder.onnx", "description.json", "characters.json"}
    assert {path.name for path in folder.iterdir()} == files
    about = json.loads((folder / "description.json").read_text())
    assert about["tokens"][:5] == ["<blank>", "\ufffd", "<sos>", "<eos>", "\u2581"] and len(about["tokens"]) == 32
    assert (about["prompt"], about["eos"], about["blank"], about["suppressed"]) == ([2, 5, 6], 3, 0, [0, 2])
    assert (about["longest_seconds"], about["sample_rate"]) == (recognizer.piece_seconds, 16_000)
    assert about["longest_transcript"] == 27
    assert (about["first_frame_begins"], about["seconds_per_frame"]) == pytest.approx(frame_times(recognizer.model))


def test_what_only_some_models_have_is_described():
    about = onnx.describe(of_kind("with a window of 3 s"))
    assert (about["suppressed"], about["suppressed_first"]) == ((0,), (4,))
    assert (about["tokens_per_frame"], about["blank"], about["longest_seconds"]) == (0.5, None, 3.0)
    assert onnx.describe(of_kind("like Whisper"))["first_timestamp"] == 30
    assert onnx.describe(of_kind("with a short table"))["longest_seconds"] == pytest.approx(2.0)
    about = onnx.describe(of_kind("like Speech2Text"))
    assert (about["takes"], about["features_dim"], about["sample_rate"]) == ("matrix", 80, 16_000)
    assert "sample_rate" not in onnx.describe(of_kind("of matrices"))
    assert "seconds_per_frame" not in onnx.describe(of_kind("of text"))


def test_graphs_do_not_say_where_they_were_made(exported):
    _, folder = exported
    for name in (onnx.ENCODER, onnx.DECODER):
        assert str(ROOT).encode() not in (folder / name).read_bytes()


def test_what_computes_something_else_is_not_left_behind(tmp_path, tiny_model, monkeypatch):
    monkeypatch.setattr(onnx, "_write_graphs", lambda recognizer, folder: (folder / onnx.ENCODER).touch())
    monkeypatch.setattr(onnx, "_session", lambda path: None)
    monkeypatch.setattr(onnx, "difference", lambda recognizer, encoder, decoder: 0.02)
    with pytest.raises(onnx.ExportError, match="the graphs differ from the model by 0.02"):
        onnx.export_onnx(Recognizer(tiny_model, precision="float32"), tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


@torch.inference_mode()
def test_whole_numbers_make_graphs_smaller_and_change_little(exported, tmp_path):
    _, folder = exported
    for name in (onnx.ENCODER, onnx.DECODER):
        path = Path(shutil.copy(folder / name, tmp_path))
        onnx._quantize(path)
        assert path.stat().st_size < (folder / name).stat().st_size
    speech = torch.from_numpy(read_audio(resource("data", "samples", "corner.flac")))  # some of its bands are quiet
    inputs = speech[None], torch.tensor([len(speech)])
    wanted, found = (onnx._session(where / onnx.ENCODER)(*inputs)[-1] for where in (folder, tmp_path))
    assert 1e-3 < (found - wanted).square().mean().sqrt() < 0.15  # 0.34 with the mel bands in whole numbers, too


def test_of_a_graph_with_weights_in_a_file_beside_it_only_the_whole_numbers_stay(exported, tmp_path):
    """As are those of a model of more than 2 GB; in whole numbers they fit into the graph."""
    import onnx as files

    graph = files.load(exported[1] / onnx.DECODER)
    files.save(graph, tmp_path / onnx.DECODER, save_as_external_data=True, location=f"{onnx.DECODER}.data")
    assert len(list(tmp_path.iterdir())) == 2
    onnx._quantize(tmp_path / onnx.DECODER)
    assert list(tmp_path.iterdir()) == [tmp_path / onnx.DECODER]
    assert onnx._session(tmp_path / onnx.DECODER)
