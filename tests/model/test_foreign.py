"""Whisper and Speech2Text with random weights: our Transformer computes what Hugging Face's models compute."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from asr.audio.config import FeatureConfig
from asr.audio.features import FrontEnd
from asr.decode.options import IMPORTED, DecodeOptions
from asr.decode.recognizer import Recognizer
from asr.import_model import main as import_command
from asr.model.folder import ModelError
from asr.model.foreign import WhisperTask, export_model, import_model
from asr.model.speech_model import SpeechModel
from asr.model.transformer import Transformer
from asr.text.speech2text import SPECIAL, Speech2TextTokenizer
from asr.text.whisper import TASKS, TIMESTAMPS, WhisperTokenizer
from tests.decode.test_precision import QUICK

transformers = pytest.importorskip("transformers")
pytest.importorskip("tiktoken")

LANGUAGES = 3


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    """A Hugging Face folder with a model of the shape of Whisper tiny with 266 text tokens, and the model."""
    folder = tmp_path_factory.mktemp("whisper")
    tokens = [bytes([i]) for i in range(256)] + [b" t", b"he", b" the", b"in", b" a", b"er", b"on", b" s", b"re", b"at"]
    vocab_size = len(tokens) + 2 + LANGUAGES + len(TASKS) + TIMESTAMPS
    config = transformers.WhisperConfig(
        vocab_size=vocab_size,
        d_model=384,
        encoder_layers=4,
        decoder_layers=4,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=1536,
        decoder_ffn_dim=1536,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 266),
        decoder_start_token_id=267,
    )
    torch.manual_seed(0)
    theirs = randomized(transformers.WhisperForConditionalGeneration(config))
    theirs.save_pretrained(folder)
    WhisperTokenizer(tokens, LANGUAGES).save(folder)
    return folder, theirs


@pytest.fixture(scope="module")
def speech2text(tmp_path_factory):
    """The same for Speech2Text small, with 40 tokens."""
    folder = tmp_path_factory.mktemp("speech2text")
    config = transformers.Speech2TextConfig(vocab_size=40, decoder_layers=6, decoder_ffn_dim=2048)
    torch.manual_seed(0)
    theirs = randomized(transformers.Speech2TextForConditionalGeneration(config))
    theirs.save_pretrained(folder)
    Speech2TextTokenizer(sentencepiece_model(), pieces()).save(folder)
    return folder, theirs


def randomized(model):
    """Moves biases and norms away from 0 and 1, so that a forgotten one is seen."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 and parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def sentencepiece_model() -> bytes:
    import io

    from sentencepiece import SentencePieceTrainer

    file = io.BytesIO()
    SentencePieceTrainer.Train(
        sentence_iterator=iter(["a hat in the rain", "the train is near the tea", "an ant ate its tart"] * 3),
        model_writer=file,
        vocab_size=20,
        minloglevel=2,
    )
    return file.getvalue()


def pieces() -> dict[str, int]:
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_proto=sentencepiece_model())
    known = [processor.IdToPiece(i) for i in range(processor.GetPieceSize())]
    names = [*SPECIAL, *(piece for piece in known if piece not in SPECIAL)]
    names += [f"filler{i}" for i in range(40 - len(names))]
    return {piece: i for i, piece in enumerate(names)}


def sounds(*seconds: float) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(0, 0.1, round(16_000 * s)).astype(np.float32) for s in seconds]


def batch(waves: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    lens = torch.tensor([len(wave) for wave in waves])
    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(wave) for wave in waves], batch_first=True), lens


@pytest.mark.parametrize("bands", [80, 128])
def test_whispers_features_are_theirs(bands):
    waves = sounds(1.0, 2.5, 0.01)
    theirs = transformers.WhisperFeatureExtractor(feature_size=bands)(waves, sampling_rate=16_000, return_tensors="pt")
    X, X_lens = FrontEnd(FeatureConfig("whisper", bands, pad_seconds=30.0))(*batch(waves))
    assert X_lens.tolist() == [3000, 3000, 3000]
    torch.testing.assert_close(X, theirs.input_features.transpose(1, 2), atol=1e-4, rtol=0)


def test_speech2texts_features_are_theirs():
    waves = sounds(1.0, 2.5, 0.3)
    theirs = transformers.Speech2TextFeatureExtractor()(
        waves, sampling_rate=16_000, padding=True, return_tensors="pt", return_attention_mask=True
    )
    X, X_lens = FrontEnd(FeatureConfig("kaldi", 80, normalization="cmvn"))(*batch(waves))
    assert X_lens.tolist() == theirs.attention_mask.sum(dim=1).tolist()
    torch.testing.assert_close(X, theirs.input_features, atol=1e-4, rtol=0)


@torch.inference_mode()
def test_whispers_encoder_and_logits_are_theirs(whisper):
    folder, theirs = whisper
    model = import_model(folder, wanted=WhisperTask("zh"))
    ours = model.transformer
    X = torch.randn(2, 3000, 80)
    Y = torch.randint(0, 266, (2, 7))
    prompt = [267, 269, 272, 276]  # start, the second language, transcribe, no timestamps
    assert ours.config.prompt == tuple(prompt)
    Y_in = torch.cat([torch.tensor(prompt).expand(2, -1), Y], dim=1)
    expected = theirs(input_features=X.transpose(1, 2), decoder_input_ids=Y_in)
    output = ours(X, torch.tensor([3000, 3000]), Y, torch.tensor([7, 7]))
    memory, _ = ours.encoder(X, torch.tensor([3000, 3000]))
    torch.testing.assert_close(memory, expected.encoder_last_hidden_state, atol=1e-4, rtol=0)
    torch.testing.assert_close(output.log_probs, expected.logits[:, 3:].log_softmax(dim=2), atol=1e-4, rtol=0)


@torch.inference_mode()
def test_speech2texts_encoder_and_logits_are_theirs_without_padding(speech2text):
    """With padding, theirs differ: what the padding becomes in the first convolution reaches the utterance's end."""
    folder, theirs = speech2text
    ours = import_model(folder).transformer
    X, X_lens = torch.randn(3, 83, 80), torch.tensor([83, 60, 41])
    Y = torch.randint(4, 40, (3, 5))
    memory, lens = ours.encoder(X, X_lens)
    output = ours(X, X_lens, Y, torch.tensor([5, 5, 5]))
    Y_in = torch.nn.functional.pad(Y, (1, 0), value=2)
    for b, (frames, length) in enumerate(zip(X_lens.tolist(), lens.tolist(), strict=True)):
        expected = theirs(input_features=X[b : b + 1, :frames], decoder_input_ids=Y_in[b : b + 1])
        torch.testing.assert_close(memory[b, :length], expected.encoder_last_hidden_state[0], atol=1e-4, rtol=0)
        torch.testing.assert_close(output.log_probs[b], expected.logits[0].log_softmax(dim=1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["whisper", "speech2text"])
def test_there_and_back_the_tensors_are_the_same(kind, request, tmp_path):
    folder, theirs = request.getfixturevalue(kind)
    import_command([str(folder), str(tmp_path / "ours")])
    import_command([str(tmp_path / "ours"), str(tmp_path / "back"), "--export"])
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    for name in before:
        if "encoder.embed_positions" in name:
            torch.testing.assert_close(before[name], after[name], atol=1e-4, rtol=0)
        else:
            assert torch.equal(before[name], after[name]), name
    modes = {path.stat().st_mode for path in (tmp_path / "back").iterdir()}
    assert len(modes) == 1  # whom the umask lets reads the weights, too
    loaded = type(theirs).from_pretrained(tmp_path / "back")
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["whisper", "speech2text"])
@torch.inference_mode()
def test_cached_steps_give_their_logits(kind, request):
    folder, theirs = request.getfixturevalue(kind)
    ours = import_model(folder).transformer
    X, X_lens = torch.randn(1, 3000 if kind == "whisper" else 90, 80), torch.tensor([3000 if kind == "whisper" else 90])
    Y = torch.randint(4, 40, (1, 6))
    memory, lens = ours.encoder(X, X_lens)
    Y_in = ours.decoder.prompted(Y)
    encoded = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=memory)
    expected = theirs(encoder_outputs=encoded, decoder_input_ids=Y_in).logits.log_softmax(dim=2)
    state = ours.decoder.start(memory, lens, 1)
    for position, token in enumerate(Y_in[0]):
        log_probs, state = ours.decoder.step(token.view(1, 1), state)
        torch.testing.assert_close(log_probs[0, 0], expected[0, position], atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def small_whisper(whisper, tmp_path_factory):
    """A model with one layer per stack that writes at most 18 tokens."""
    folder = tmp_path_factory.mktemp("small")
    described = json.loads((whisper[0] / "config.json").read_text())
    shape = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "max_target_positions": 22}
    heads = {f"{stack}_attention_heads": 2 for stack in ("encoder", "decoder")}
    widths = {f"{stack}_ffn_dim": 64 for stack in ("encoder", "decoder")}
    config = transformers.WhisperConfig(**described | shape | heads | widths)
    transformers.WhisperForConditionalGeneration(config).save_pretrained(folder)
    (folder / "whisper.json").write_bytes((whisper[0] / "whisper.json").read_bytes())
    return folder


@pytest.mark.parametrize("precision", ["float32", "bfloat16", pytest.param("int8", marks=QUICK)])
@pytest.mark.parametrize("options", [DecodeOptions("greedy", beam_size=1), DecodeOptions(ctc_weight=0.0, nbest=2)])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_recogniser_searches_in_it_and_writes_text_alone(small_whisper, precision, options):
    recognizer = Recognizer(import_model(small_whisper), options, precision=precision)
    config = recognizer.model.transformer.config
    for best in recognizer.recognize(sounds(1.0, 1.7)):
        assert len(best) == options.nbest
        assert 0 < len(best[0].tokens) <= 18
        assert not set(best[0].tokens) & {*config.suppressed, *config.prompt, config.eos}
        assert best[0].tokens[0] not in config.suppressed_first


def test_what_needs_ctc_is_refused_and_no_default(small_whisper, tmp_path):
    model = import_model(small_whisper)
    model.save(tmp_path)  # as a training does: without decoding options
    assert Recognizer(model).options == IMPORTED
    assert Recognizer.load(tmp_path, "cpu").options == IMPORTED
    for options in (DecodeOptions("rescore"), DecodeOptions("ctc"), DecodeOptions(ctc_weight=0.3)):
        with pytest.raises(ValueError, match="no CTC head"):
            Recognizer(model, options)


def test_asr_load_takes_the_checkpoint_itself(small_whisper):
    import asr

    text = asr.load(f"whisper:{small_whisper}", device="cpu").transcribe(sounds(1.0)[0]).text
    assert text


def test_what_is_no_checkpoint_is_refused_in_one_line(tmp_path, whisper, capsys):
    folder, _ = whisper
    for source, message in (
        (tmp_path / "nothing", "nothing: no such file or folder"),
        (tmp_path, "config.json is missing"),
    ):
        with pytest.raises(ModelError, match=message):
            import_model(source)
    with pytest.raises(ModelError, match="knows no 'xx'"):
        import_model(folder, wanted=WhisperTask("xx"))
    described = json.loads((folder / "config.json").read_text())
    for change, message in (
        ({"model_type": "bert"}, "neither whisper nor speech_to_text"),
        ({"encoder_layers": 5}, "encoder.layers.4.* is missing"),
        ({"decoder_ffn_dim": 7}, "differ"),
    ):
        damaged = tmp_path / "damaged"
        damaged.mkdir(exist_ok=True)
        for file in ("model.safetensors", "whisper.json"):
            (damaged / file).write_bytes((folder / file).read_bytes())
        (damaged / "config.json").write_text(json.dumps(described | change))
        with pytest.raises(ModelError, match=message):
            import_model(damaged)
    with pytest.raises(SystemExit) as stopped:
        import_command([str(tmp_path / "nothing.pt"), str(tmp_path / "out")])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"asr.import_model: {tmp_path}/nothing.pt: no such file or folder\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("text.pt", b"hello", "cannot be imported"),
        ("empty.pt", b"", "cannot be imported"),
        ("weights.pt", {"weight": torch.ones(1)}, "cannot be imported .'dims' is missing"),
        ("weights/config.json", b'{"model_type": "whisper"}', "model.safetensors is missing"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path, name, content, message):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    if isinstance(content, dict):
        torch.save(content, tmp_path / name)
    else:
        (tmp_path / name).write_bytes(content)
    source = tmp_path / name if name.endswith(".pt") else (tmp_path / name).parent
    with pytest.raises(ModelError, match=message) as refused:
        import_model(source)
    assert "\n" not in str(refused.value) and "weights_only" not in str(refused.value)  # torch's unsafe advice


def test_a_checkpoint_is_not_written_over(whisper, capsys):
    folder = str(whisper[0])
    before = {path.name: path.read_bytes() for path in whisper[0].iterdir()}
    for arguments in ([folder, folder], [folder, folder + "/.", "--export"]):
        with pytest.raises(SystemExit, match="2"):
            import_command(arguments)
        assert "would overwrite what is read" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in whisper[0].iterdir()} == before


def test_a_model_of_another_form_is_not_exported(tiny_model, small_whisper, tmp_path):
    other = import_model(small_whisper)
    config = dataclasses.replace(other.transformer.config, encoder="conformer")
    other.transformer = Transformer(config)
    windowed = import_model(small_whisper)
    windowed.transformer.set_window(8, 8)
    biased = import_model(small_whisper)
    biased.transformer = Transformer(dataclasses.replace(biased.transformer.config, key_bias=True))
    for model in (tiny_model, other, windowed, biased):
        with pytest.raises(ModelError, match="Whisper or Speech2Text"):
            export_model(model, tmp_path)


def test_a_path_through_a_file_is_no_checkpoint(tmp_path):
    (tmp_path / "a.txt").write_text("a file")
    with pytest.raises(ModelError, match="tiny.pt: cannot be imported"):
        import_model(tmp_path / "a.txt" / "tiny.pt")


def test_what_is_not_english_has_the_neutral_normaliser(whisper):
    assert import_model(whisper[0], wanted=WhisperTask("de")).normalize("Größe?") == "größe"
    assert import_model(whisper[0], wanted=WhisperTask("de", "translate")).normalizer_name == "english"


def test_an_openai_checkpoint_is_the_same_model(whisper, tmp_path):
    """Hugging Face's weights under OpenAI's names, as `.pt`."""
    folder, _ = whisper
    ours = import_model(folder)
    names = (
        (r"model\.(encoder|decoder)\.layers\.(\d+)\.", r"\1.blocks.\2."),
        (r"\.self_attn_layer_norm\.", ".attn_ln."),
        (r"\.encoder_attn_layer_norm\.", ".cross_attn_ln."),
        (r"\.self_attn\.", ".attn."),
        (r"\.encoder_attn\.", ".cross_attn."),
        (r"\.(q|k|v|out)_proj\.", lambda m: {"q": ".query.", "k": ".key.", "v": ".value.", "out": ".out."}[m[1]]),
        (r"\.fc1\.", ".mlp.0."),
        (r"\.fc2\.", ".mlp.2."),
        (r"\.final_layer_norm\.", ".mlp_ln."),
        (r"model\.encoder\.(conv\d)", r"encoder.\1"),
        (r"model\.encoder\.layer_norm", "encoder.ln_post"),
        (r"model\.decoder\.layer_norm", "decoder.ln"),
        (r"model\.decoder\.embed_tokens", "decoder.token_embedding"),
        (r"model\.(encoder|decoder)\.embed_positions\.weight", r"\1.positional_embedding"),
    )
    import re

    weights = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for pattern, replacement in names:
            name = re.sub(pattern, replacement, name)
        weights[name] = tensor.half()
    config = ours.transformer.config
    dims = {"n_mels": 80, "n_audio_ctx": 1500, "n_audio_state": 384, "n_audio_head": 6, "n_audio_layer": 4}
    dims |= {"n_vocab": config.vocab_size, "n_text_ctx": 448, "n_text_state": 384, "n_text_head": 6, "n_text_layer": 4}
    torch.save({"dims": dims, "model_state_dict": weights}, tmp_path / "tiny.pt")
    (tmp_path / "vocab.json").write_text(json.dumps(byte_level(ours.tokenizer.tokens)))
    theirs = import_model(tmp_path / "tiny.pt", vocabulary=tmp_path / "vocab.json")
    assert theirs.transformer.config == config
    assert theirs.tokenizer == ours.tokenizer
    for name, tensor in ours.transformer.state_dict().items():
        assert torch.equal(theirs.transformer.state_dict()[name], tensor.half().float()), name


def byte_level(tokens: list[bytes]) -> dict[str, int]:
    from asr.text.whisper import _byte_of_character

    character = {byte: char for char, byte in _byte_of_character().items()}
    return {"".join(character[byte] for byte in token): i for i, token in enumerate(tokens)}


def test_an_imported_model_is_saved_and_loaded_like_ours(whisper, tmp_path):
    model = import_model(whisper[0])
    model.save(tmp_path)
    again = SpeechModel.load(tmp_path)
    assert again.transformer.config == model.transformer.config
    assert again.tokenizer == model.tokenizer
    assert again.front_end.config == model.front_end.config


def test_it_is_trained_on_as_the_experiment_says(whisper, tmp_path):
    from asr.training.run import train
    from tests.training.tones import compose_options, write_corpus

    for part in ("train", "dev"):
        write_corpus(tmp_path / part, 4, seed=1)
    import_model(whisper[0], wanted=WhisperTask(window=1.5)).save(tmp_path / "whisper")
    settings = [f"init_from={tmp_path / 'whisper'}", "epochs=1", "optimizer.warmup=1"]
    config = compose_options("train", tmp_path, tmp_path / "out", ["experiment=whisper", *settings])
    folder, _ = train(config)
    trained = SpeechModel.load(folder)
    assert config.model == trained.transformer.config and config.model.d_model == 384


def test_what_speech2text_cannot_write_is_known():
    tokenizer = Speech2TextTokenizer(sentencepiece_model(), pieces())
    assert tokenizer.lacks_some(tokenizer.encode("hat 日本"))
    assert not tokenizer.lacks_some(tokenizer.encode("the hat"))
