import io
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import soundfile
import torch

from asr.audio.config import FeatureConfig
from asr.audio.reading import SAMPLE_RATE, AudioError
from asr.corpus import open_corpus
from asr.decode.confidence import Calibration
from asr.decode.corpora import align_cuts, transcribe_cuts
from asr.decode.options import DecodeOptions, Hypothesis
from asr.decode.recognizer import Recognizer
from asr.model.language_model import LanguageModel, TextModel
from asr.model.speech_model import SpeechModel
from asr.model.transformer import Transformer
from asr.text.tokenizer import BLANK, CharTokenizer
from tests.conftest import LETTERS
from tests.decode.test_precision import QUICK


@pytest.fixture
def recognizer(tiny_model) -> Recognizer:
    with torch.no_grad():
        tiny_model.transformer.ctc.weight.mul_(5)
    return Recognizer(tiny_model, DecodeOptions(beam_size=3, nbest=2), batch_seconds=5, precision="float32")


def noise(seconds: float, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.1, round(seconds * SAMPLE_RATE)).astype(np.float32)


def test_files_and_arrays_give_the_same_transcript(recognizer, tmp_path):
    soundfile.write(tmp_path / "a.wav", noise(2), SAMPLE_RATE, subtype="FLOAT")
    from_file, from_array = recognizer.transcribe(tmp_path / "a.wav"), recognizer.transcribe(noise(2))
    assert from_file.segments == from_array.segments
    assert from_file.text == from_file.segments[0].text
    assert from_file.duration == 2.0
    assert len(from_file.segments[0].nbest) == 2


def test_the_duration_is_that_of_the_recording_pauses_included(recognizer):
    sound = np.concatenate([noise(3), np.zeros(30 * SAMPLE_RATE, np.float32)])
    assert recognizer.transcribe(sound).duration == 33.0


def test_transcripts_come_in_order_and_do_not_depend_on_the_batch(recognizer):
    sounds = [noise(s, seed=i) for i, s in enumerate([3, 1, 7, 0.5, 2, 2, 4, 1, 6, 3] * 3)]
    together = list(recognizer.transcribe_all(sounds))
    for sound, transcript in zip(sounds, together, strict=True):
        alone = recognizer.transcribe(sound)
        assert transcript.text == alone.text
        assert transcript.segments[0].score == pytest.approx(alone.segments[0].score, abs=1e-4)


def test_of_no_inputs_there_is_nothing(recognizer):
    assert recognizer.recognize([]) == recognizer.align([], []) == []


def test_the_memory_does_not_depend_on_how_much_is_encoded_at_once(recognizer, monkeypatch):
    inputs = [(torch.randn(size) * 0.1).numpy() for size in (20_000, 16_000, 15_000, 3_000, 100)]
    memory, lens = recognizer.encode(inputs)
    monkeypatch.setattr("asr.decode.recognizer.ENCODED", 2.5)
    in_parts, lens_in_parts = recognizer.encode(inputs)
    assert torch.equal(lens_in_parts, lens)
    for ours, theirs, size in zip(in_parts, memory, lens, strict=True):
        torch.testing.assert_close(ours[:size], theirs[:size], atol=1e-2, rtol=1e-2)


def test_one_recognizer_serves_several_threads(recognizer):
    sounds = [noise(seconds, seed) for seed, seconds in enumerate((1.0, 2.0, 25.0, 3.0))]
    alone = [recognizer.transcribe(sound) for sound in sounds]
    with ThreadPoolExecutor(len(sounds)) as pool:
        assert list(pool.map(recognizer.transcribe, sounds)) == alone


def test_a_request_may_have_options_of_its_own(recognizer):
    before, sound = recognizer.transcribe(noise(2)), noise(2)
    asked = recognizer.with_options(nbest=1, phrases=["abab"], phrase_weight=50.0)
    assert asked.model is recognizer.model
    assert "abab" in asked.transcribe(sound).text.replace(" ", "")
    assert recognizer.transcribe(sound) == before
    assert "abab" not in before.text.replace(" ", "")
    with pytest.raises(ValueError, match="beam size, 3"):
        recognizer.with_options(nbest=4)


def test_an_unreadable_file_does_not_stop_the_others(recognizer, tmp_path):
    soundfile.write(tmp_path / "a.wav", noise(1), SAMPLE_RATE)
    (tmp_path / "b.wav").write_bytes(b"")
    names = [tmp_path / "a.wav", tmp_path / "b.wav", tmp_path / "c.wav", tmp_path / "a.wav"]
    transcripts = list(recognizer.transcribe_all(names))
    assert [bool(t.error) for t in transcripts] == [False, True, True, False]
    assert "b.wav" in transcripts[1].error and "c.wav: no such file" in transcripts[2].error
    with pytest.raises(AudioError, match="c.wav"):
        recognizer.transcribe(tmp_path / "c.wav")


@pytest.mark.parametrize(("suffix", "lost"), [("wav", 20_000), ("flac", 20_000), ("ogg", 500)])
def test_of_a_file_that_breaks_off_what_is_there_is_transcribed(recognizer, tmp_path, suffix, lost):
    whole = tmp_path / f"whole.{suffix}"
    soundfile.write(whole, noise(15), SAMPLE_RATE)
    data = whole.read_bytes()
    (tmp_path / f"cut.{suffix}").write_bytes(data[:-lost])
    first, second = recognizer.transcribe_all([tmp_path / f"cut.{suffix}", whole])
    assert "cut off" in first.error or "damaged after" in first.error
    assert first.text and len(first.segments) == len(second.segments) == 1 and 13 < first.duration < 15
    assert second.error is None
    with pytest.raises(AudioError, match="cut"):
        recognizer.transcribe(tmp_path / f"cut.{suffix}")


def test_long_recordings_are_cut_to_what_the_model_was_trained_on(tiny_model, tmp_path):
    assert Recognizer(tiny_model, precision="float32").piece_seconds == 20.0
    tiny_model.trained_seconds = 4.5
    tiny_model.save(tmp_path)
    assert Recognizer.load(tmp_path).piece_seconds == 4.5
    assert Recognizer.load(tmp_path, piece_seconds=9).piece_seconds == 9
    for tiny_model.trained_seconds, seconds in ((28.0, 20.0), (0.4, 2.0)):
        assert Recognizer(tiny_model, precision="float32").piece_seconds == seconds


def test_what_is_padded_to_a_window_takes_as_much_of_a_batch_as_the_window(tiny_config, monkeypatch):
    model = SpeechModel(FeatureConfig("whisper", pad_seconds=3.0), Transformer(tiny_config), CharTokenizer(LETTERS))
    recognizer, batches = Recognizer(model, batch_seconds=12), []
    nothing = [Hypothesis([], 0.0)]
    monkeypatch.setattr(recognizer, "recognize", lambda inputs: batches.append(len(inputs)) or [nothing] * len(inputs))
    assert len(list(recognizer.transcribe_all([noise(1)] * 9))) == 9
    assert batches == [4, 4, 1]


@pytest.mark.parametrize("sound", [np.zeros(0), np.zeros(160), noise(0.01), np.zeros(5 * SAMPLE_RATE)])
def test_silence_and_a_moment_of_sound_give_the_empty_transcript(recognizer, sound):
    assert recognizer.transcribe(sound).text == ""


def test_where_ctc_hears_nothing_nothing_was_said(recognizer):
    sounds = [noise(2), noise(1)]
    heard = [transcript.text for transcript in recognizer.transcribe_all(sounds)]
    with torch.no_grad():
        recognizer.model.transformer.ctc.bias[BLANK] += 100
    assert all(heard) and [transcript.text for transcript in recognizer.transcribe_all(sounds)] == ["", ""]
    recognizer.options = DecodeOptions(beam_size=3, ctc_weight=0.0)  # then CTC is not asked
    assert all(transcript.text for transcript in recognizer.transcribe_all(sounds))


def test_doubtful_words_without_speech_were_not_said(recognizer, monkeypatch):
    asked = []
    monkeypatch.setattr("asr.decode.recognizer.has_speech", lambda samples: asked.append(len(samples)))
    sounds = [noise(2), noise(1)]
    assert [transcript.text for transcript in recognizer.transcribe_all(sounds)] == ["", ""]
    assert asked == [len(sound) for sound in sounds]
    asked.clear()
    recognizer.calibration = Calibration(bias=10, mean=0, least=0)  # now the model is sure of its words
    assert all(transcript.text for transcript in recognizer.transcribe_all(sounds)) and not asked


def test_progress_hears_of_every_second(recognizer):
    done = []
    list(recognizer.transcribe_all([noise(3), noise(1)], done.append))
    assert sum(done) == pytest.approx(4.0)


def test_results_come_before_the_last_file_is_read_and_no_more_is_read_than_a_few_batches(recognizer, monkeypatch):
    read, batches, nothing = [], [], [Hypothesis([], 0.0)]
    monkeypatch.setattr(recognizer, "recognize", lambda inputs: batches.append(inputs) or [nothing] * len(inputs))

    def sounds():
        for i in range(60):
            read.append(i)
            yield np.zeros((1 + i % 3) * SAMPLE_RATE)

    ahead = [len(read) - done for done, _ in enumerate(recognizer.transcribe_all(sounds()))]
    assert len(ahead) == 60 and ahead[0] <= 4
    assert max(ahead) <= 14  # five batches of five seconds, and the one that is being read
    assert max(len(batch) * max(map(len, batch)) for batch in batches) <= 5 * SAMPLE_RATE


@pytest.mark.parametrize("sound", [np.full(90, np.nan), np.zeros(90, np.int32), np.full(90, 1e20), np.zeros((1, 90))])
def test_arrays_that_are_no_sound_are_refused(recognizer, sound):
    wrong = "samples must be finite|samples are floats in .* or int16, not int32|one channel at a time, or their mean"
    with pytest.raises(AudioError, match=wrong):
        recognizer.transcribe(sound)


def test_a_recording_may_be_bytes_an_open_file_whole_numbers_or_a_tensor(recognizer, tmp_path):
    soundfile.write(tmp_path / "a.wav", noise(2), SAMPLE_RATE)
    numbers, _ = soundfile.read(tmp_path / "a.wav", dtype="int16")
    data = (tmp_path / "a.wav").read_bytes()
    with open(tmp_path / "a.wav", "rb") as file:
        recordings = [data, file, io.BytesIO(data), numbers, torch.from_numpy(numbers / np.float32(32768))]
        heard = list(recognizer.transcribe_all([tmp_path / "a.wav", *recordings]))
    assert len({transcript.text for transcript in heard}) == 1 and not any(each.error for each in heard)
    assert [each.name for each in heard[1:]] == ["<bytes>", str(tmp_path / "a.wav"), "<file>", "<array>", "<array>"]
    with pytest.raises(TypeError, match="several recordings"):
        recognizer.transcribe_all(data).__next__()


def test_whole_numbers_may_have_their_bytes_in_the_other_order_and_an_array_a_mask(recognizer):
    numbers = (noise(2) * 32767).astype(np.int16)
    others = [numbers.astype(">i2"), np.ma.array(numbers / 32768)]
    assert {transcript.text for transcript in recognizer.transcribe_all([numbers, *others])} == {
        recognizer.transcribe(numbers).text
    }


def test_what_was_read_before_an_error_of_the_recordings_is_transcribed(recognizer):
    def breaks_off():
        yield noise(2)
        yield noise(3)
        raise ConnectionError("the line is dead")

    for recordings, error in ((breaks_off(), ConnectionError), ([noise(2), noise(3), None], TypeError)):
        found = []
        with pytest.raises(error):
            for transcript in recognizer.transcribe_all(recordings):
                found.append(transcript.duration)
        assert found == [2.0, 3.0]


def test_what_is_neither_a_path_nor_an_array_is_named(recognizer):
    with pytest.raises(TypeError, match="a path, bytes, a file, an array or a tensor, not dict"):
        recognizer.transcribe({"array": np.zeros(16000)})


def test_one_recording_is_not_taken_for_several(recognizer):
    for one in ("ab.wav", noise(1)):
        with pytest.raises(TypeError, match="several recordings"):
            next(recognizer.transcribe_all(one))


def test_a_text_is_among_the_n_best_once(recognizer, monkeypatch):
    several = replace(recognizer.options, beam_size=6, nbest=3)
    monkeypatch.setattr(recognizer, "options", several)
    spelled = [Hypothesis([4], -1.0), Hypothesis([5], -2.0), Hypothesis([4, 4], -3.0), Hypothesis([6], -4.0)]
    monkeypatch.setattr(recognizer, "_text", lambda hypothesis: {4: "a", 5: "b", 6: "c"}[hypothesis.tokens[0]])
    asked = []
    monkeypatch.setattr(
        "asr.decode.recognizer.search_with_fallback", lambda *args: asked.append(args[3].nbest) or [spelled]
    )
    (found,) = recognizer.recognize([noise(1)])
    assert [hypothesis.tokens for hypothesis in found] == [[4], [5], [6]]
    assert asked == [6]


def test_two_channels_are_refused_as_an_array(recognizer):
    with pytest.raises(AudioError, match=r"\(N,\)"):
        recognizer.transcribe(np.zeros((100, 2), np.float32))


@pytest.mark.parametrize("channel", [-1, 0.5])
def test_channels_count_from_0(tiny_model, channel):
    with pytest.raises(ValueError, match=f"channel counts from 0, and is {channel}"):
        Recognizer(tiny_model, channel=channel)


def test_what_is_not_longer_than_a_piece_stays_whole(tiny_model):
    assert list(Recognizer(tiny_model, precision="float32").pieces(noise(30))) == []  # no speech between pauses
    (whole,) = Recognizer(tiny_model, precision="float32", piece_seconds=30).pieces(noise(30))
    assert len(whole.samples) == 30 * SAMPLE_RATE and whole.start == 0
    long = np.tile(noise(60), 10)  # more than the detector of pauses sees at once
    (whole,) = Recognizer(tiny_model, precision="float32", piece_seconds=601).pieces(long)
    assert len(whole.samples) == len(long)


@pytest.mark.parametrize("seconds", [0.02, float("inf"), float("nan"), -1])
def test_pieces_of_no_length_are_refused(tiny_model, seconds):
    with pytest.raises(ValueError, match="piece_seconds must lie between 1 and 86400"):
        Recognizer(tiny_model, piece_seconds=seconds)


@pytest.mark.parametrize("seconds", [0.0, float("inf"), float("nan"), -1])
def test_batches_of_no_length_are_refused(tiny_model, seconds):
    with pytest.raises(ValueError, match="batch_seconds must be positive and finite"):
        Recognizer(tiny_model, batch_seconds=seconds)


def test_a_window_at_decoding_is_that_of_a_model_built_with_it(tiny_model, tiny_config):
    windowed = Transformer(replace(tiny_config, attention_left=3, attention_right=2)).eval()
    windowed.load_state_dict(tiny_model.transformer.state_dict())
    given = Recognizer(tiny_model, precision="float32", attention_window=(3, 2)).model.transformer
    X, X_lens = torch.randn(1, 300, 80), torch.tensor([300])
    assert given.encoder.config.attention_window == (3, 2)
    torch.testing.assert_close(given.encoder(X, X_lens)[0], windowed.encoder(X, X_lens)[0])
    with pytest.raises(ValueError, match="at least one frame besides its own"):
        Recognizer(tiny_model, attention_window=(0, 0))


@pytest.mark.parametrize("precision", [pytest.param("int8", marks=QUICK), "bfloat16"])
def test_a_linear_front_end_decodes_in_every_precision(tiny_config, noise_is_heard, precision, monkeypatch):
    monkeypatch.setattr("asr.decode.recognizer.has_speech", lambda samples: False)  # which is for sound alone
    config = replace(tiny_config, subsampler="linear", subsampling=1, input_dim=12)
    model = SpeechModel(FeatureConfig("matrix", 12), Transformer(config), CharTokenizer(LETTERS))
    matrix = np.random.default_rng(0).normal(size=(20, 12)).astype(np.float32)
    assert Recognizer(model, precision=precision).transcribe(matrix).text


def test_what_the_encoder_has_no_positions_for_does_not_stop_the_others(tiny_config, tmp_path, caplog):
    config = replace(
        tiny_config, subsampler="linear", subsampling=1, input_dim=12, positions="learned", max_positions=50
    )
    model = SpeechModel(FeatureConfig("matrix", 12), Transformer(config), CharTokenizer(LETTERS))
    matrices = [np.ones((frames, 12), np.float32) for frames in (20, 51, 50)]
    first, second, third = Recognizer(model).transcribe_all(matrices)
    assert first.error is None and third.error is None
    assert second.error == "<array>: 51 encoder frames are more than model.max_positions=50"
    for name, matrix in zip("abc", matrices, strict=True):
        np.save(tmp_path / f"{name}.npy", matrix)
    entries = [json.dumps({"audio_filepath": f"{name}.npy", "text": "ab"}) for name in "abc"]
    (tmp_path / "m.jsonl").write_text("\n".join(entries))
    done = transcribe_cuts(Recognizer(model), open_corpus(tmp_path / "m.jsonl"))
    assert len(done.cuts) == len(done.references) == len(done.transcripts) == 2
    assert "51 encoder frames are more than model.max_positions=50" in caplog.text and "<array>" not in caplog.text
    caplog.clear()
    aligned = align_cuts(Recognizer(model), open_corpus(tmp_path / "m.jsonl"))
    assert len(aligned) == 2 and "51 encoder frames are more than model.max_positions=50" in caplog.text


def test_nothing_to_read_gives_the_empty_transcript(tiny_config):
    linear = replace(tiny_config, subsampler="linear", subsampling=1, input_dim=12)
    embedding = replace(tiny_config, subsampler="embedding", subsampling=1, encoder="transformer")
    for config, kind, nothing in ((linear, "matrix", np.zeros((0, 12), np.float32)), (embedding, "text", " ")):
        model = SpeechModel(FeatureConfig(kind=kind, dim=12), Transformer(config), CharTokenizer(LETTERS))
        assert Recognizer(model).transcribe(nothing).text == ""


def test_what_holds_no_matrix_does_not_stop_the_others(tiny_config, tmp_path):
    """Bytes, an open file, and an archive of arrays that is named like one array."""
    np.savez(archive := tmp_path / "a.npy.npz", a=np.ones((20, 12)))
    archive.rename(tmp_path / "a.npy")
    config = replace(tiny_config, subsampler="linear", subsampling=1, input_dim=12)
    recognizer = Recognizer(SpeechModel(FeatureConfig("matrix", 12), Transformer(config), CharTokenizer(LETTERS)))
    others = [b"bytes", io.BytesIO(b"file"), tmp_path / "a.npy"]
    right, *wrong, last = recognizer.transcribe_all([np.ones((20, 12)), *others, np.ones((20, 12))])
    assert right.error is None and last.error is None
    assert all("matrix" in transcript.error for transcript in wrong)


def test_the_name_of_an_open_file_can_be_printed(tiny_model, tmp_path):
    path = tmp_path / os.fsdecode(b"\xff.wav")
    soundfile.write(tmp_path / "a.wav", np.zeros(SAMPLE_RATE), SAMPLE_RATE)
    (tmp_path / "a.wav").rename(path)
    with path.open("rb") as file:
        assert Recognizer(tiny_model).transcribe(file).name == f"{tmp_path}/\ufffd.wav"


def test_a_call_that_is_refused_leaves_the_model_as_it_was(tiny_model):
    for wrong in ({"channel": -1}, {"options": DecodeOptions(ilm_weight=0.1)}, {"attention_window": (0, 0)}):
        language_model = TextModel(LanguageModel(tiny_model.transformer.config), tiny_model.tokenizer)
        with pytest.raises(ValueError):
            Recognizer(tiny_model, precision="bfloat16", language_model=language_model, **wrong)
        for model in (tiny_model, language_model):
            assert next(model.transformer.parameters()).dtype == torch.float32


@pytest.mark.parametrize(
    "matrix",
    [np.full((20, 12), np.nan), np.full((20, 12), 1e300), np.ones((20, 12), np.complex64), np.full((20, 12), "x")],
    ids=["nan", "too large", "complex", "words"],
)
def test_an_array_that_is_no_matrix_of_numbers_does_not_stop_the_others(tiny_config, matrix):
    config = replace(tiny_config, subsampler="linear", subsampling=1, input_dim=12)
    recognizer = Recognizer(SpeechModel(FeatureConfig("matrix", 12), Transformer(config), CharTokenizer(LETTERS)))
    wrong, right = recognizer.transcribe_all([matrix, np.ones((20, 12))])
    assert wrong.error.startswith("<array>: ") and "feature matrix" in wrong.error and right.error is None


def test_half_precision_is_heard_and_what_is_infinite_in_it_is_no_sound(recognizer, recwarn):
    sound = noise(1).astype(np.float16)
    assert recognizer.transcribe(sound).error is None
    sound[5] = np.inf
    with pytest.raises(AudioError, match="samples must be finite"):
        recognizer.transcribe(sound)
    assert not [warning for warning in recwarn if "overflow" in str(warning.message)]


def test_a_sound_is_no_matrix(tiny_config, tmp_path):
    soundfile.write(tmp_path / "a.wav", noise(1), SAMPLE_RATE)
    config = replace(tiny_config, subsampler="linear", subsampling=1, input_dim=12)
    recognizer = Recognizer(SpeechModel(FeatureConfig("matrix", 12), Transformer(config), CharTokenizer(LETTERS)))
    with pytest.raises(AudioError, match=r"a\.wav: not a feature matrix \(\.npy or \.pt\)"):
        recognizer.transcribe(tmp_path / "a.wav")


def test_a_text_lasts_as_long_as_its_segments(tiny_config):
    config = replace(tiny_config, subsampler="embedding", subsampling=1, encoder="transformer")
    model = SpeechModel(FeatureConfig(kind="text", dim=12), Transformer(config), CharTokenizer(LETTERS))
    transcript = Recognizer(model).transcribe("abc")
    assert transcript.duration == transcript.segments[-1].end > 0


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_does_not_exist_is_named(device):
    with pytest.raises(ValueError, match=f"^device {device}: [^\n]+$"):
        Recognizer.load(device=device)
