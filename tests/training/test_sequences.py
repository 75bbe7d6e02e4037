"""Any sequence in, any script out: matrices, text, and transcripts in languages other than English."""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile

import asr
from asr import evaluate, plots, transcribe
from asr.audio.reading import SAMPLE_RATE
from asr.corpus import open_corpus
from asr.decode.corpora import transcribe_cuts
from asr.decode.observation import observe
from asr.decode.options import DecodeOptions
from asr.decode.scoring import character_errors
from asr.training.run import train
from tests.test_commands import call, run
from tests.training.tones import options

PAIRS = [("one", "un"), ("two", "deux"), ("three", "trois"), ("four", "quatre"), ("five", "cinq")]
TEXT = [
    *("features.kind=text", "model.subsampler=embedding", "model.subsampling=1", "model.encoder=transformer"),
    *("model.ctc=false", "model.tokens_per_frame=4", "data.min_seconds=0"),
    *("validation.strategy=greedy", "validation.beam_size=1", "validation.ctc_weight=0", "average=1"),
]
MATRICES = [
    *("features.kind=matrix", "features.dim=12", "model.subsampler=linear", "model.subsampling=1"),
    *("model.encoder=transformer", "spec_augment.freq_masks=0", "spec_augment.time_masks=0"),
]


def short(longest: float, batch: float) -> list[str]:
    """Options for utterances of at most `longest` seconds, `batch` seconds per batch: many updates for little data."""
    seconds = {"max_seconds": longest, "batch_seconds": batch, "global_batch_seconds": batch}
    return [f"data.{name}={value}" for name, value in seconds.items()]


def write_pairs(path: Path, count: int, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    lines = []
    for _ in range(count):
        words = [PAIRS[i] for i in rng.integers(0, len(PAIRS), rng.integers(1, 4))]
        source, text = (" ".join(side) for side in zip(*words, strict=True))
        lines.append(json.dumps({"source": source, "text": text}))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    sets = {
        name: write_pairs(folder / f"{name}.jsonl", *size) for name, size in (("train", (200, 1)), ("dev", (30, 2)))
    }
    corpora = [f"data.{name}=[{path}]" for name, path in sets.items()]
    model, wer = train(
        options(folder, folder / "exp", *corpora, *TEXT, *short(0.5, 3), "epochs=30", "validate_every=30")
    )
    return folder, model, wer


def test_text_is_translated_by_the_same_trainer_and_search(translator):
    folder, model, wer = translator
    assert wer < 10
    recognizer = asr.load(model)
    assert recognizer.transcribe("three one").text == "trois un"
    done = transcribe_cuts(recognizer, open_corpus(folder / "dev.jsonl"))
    assert character_errors(done.references, done.hypotheses).rate < 10


def test_texts_are_not_padded_beyond_the_positions_that_there_are(translator, tmp_path):
    folder, *_ = translator
    corpora = [f"data.{name}=[{folder / name}.jsonl]" for name in ("train", "dev")]
    learned = ["model.positions=learned", "model.max_positions=15"]  # not a multiple of 8; some texts are this long
    train(options(folder, tmp_path, *corpora, *TEXT, *short(0.5, 3), *learned, "epochs=1"))


def test_lines_of_text_become_lines_of_text(translator, programs):
    folder, model, _ = translator
    (folder / "lines.txt").write_text("two\nfour five\n")
    done = call("asr.transcribe", "--model", model, folder / "lines.txt")
    assert done.stdout.decode().splitlines() == ["deux", "quatre cinq"], done.stderr
    piped = run("asr.transcribe", "--model", model, "-", input=b"three\n", python=programs / "python")
    assert piped.stdout.decode() == "trois\n"
    scored = call("asr.evaluate", folder / "dev.jsonl", "--model", model).stdout.decode()
    assert "SER" in scored and "30 utterances" in scored and "sound" not in scored


def test_matrices_whose_labels_are_as_fast_as_their_frames(tmp_path):
    rng = np.random.default_rng(0)
    shapes = rng.normal(0, 1, (6, 12))
    for part, count in (("train", 240), ("dev", 20)):
        (tmp_path / part).mkdir()
        for i in range(count):
            labels = np.cumsum(rng.integers(1, 6, rng.integers(4, 9))) % 6
            np.save(tmp_path / part / f"{i}.npy", shapes[labels] + rng.normal(0, 0.1, (len(labels), 12)))
            (tmp_path / part / f"{i}.txt").write_text("".join("abcdef"[label] for label in labels))
    settings = [*MATRICES, *short(0.2, 0.5), "data.min_seconds=0", "epochs=12", "validate_every=12"]
    model, _ = train(options(tmp_path, tmp_path / "exp", *settings))
    recognizer = asr.load(model)
    done = transcribe_cuts(recognizer, open_corpus(tmp_path / "dev"))
    assert character_errors(done.references, done.hypotheses).rate < 10
    heard = call("asr.transcribe", "--model", model, tmp_path / "dev")  # a folder of matrices
    assert len(heard.stdout.splitlines()) == 20


SENTENCES = {
    "Chinese": [
        "你好世界。",
        "今天天气很好。",
        "我们学习语音",
        "识别模型",
        "春眠不觉晓",
        "处处闻啼鸟",
        "夜来风雨声",
        "花落知多少",
    ],
    "Russian": [*("Привет, мир!", "Ёлка зелёная.", "Москва", "Как дела?"), *("Спасибо", "Щука", "Объявление", "Июнь")],
    "French": [*("L’été déjà", "Où êtes-vous ?", "garçon", "Noël"), *("cœur", "À bientôt !", "forêt", "naïve")],
}
REFERENCES = {"Chinese": "你好世界", "Russian": "привет мир", "French": "l'été déjà"}


@pytest.mark.parametrize("language", SENTENCES)
def test_no_step_assumes_english(language, tmp_path):
    sentences = list(enumerate(SENTENCES[language]))
    alphabet = sorted(set("".join(SENTENCES[language]).lower()))
    t = np.arange(SAMPLE_RATE // 10) / SAMPLE_RATE
    pitches = np.geomspace(150, 7000, len(alphabet))
    tones = [0.3 * np.hanning(len(t)) * np.sin(2 * np.pi * hertz * t) for hertz in pitches]
    for i, text in sentences:
        spoken = np.concatenate([tones[alphabet.index(character)] for character in text.lower()])
        soundfile.write(tmp_path / f"{i}.wav", spoken, SAMPLE_RATE)
    for name, copies in (("train", 10), ("dev", 1)):  # an epoch has a fixed cost: few large ones
        cuts = [
            {"id": f"{i}-{j}", "audio_filepath": f"{i}.wav", "text": text}
            for j in range(copies)
            for i, text in sentences
        ]
        lines = [json.dumps(cut, ensure_ascii=False) for cut in cuts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    manifest = tmp_path / "dev.jsonl"
    corpora = [
        f"data.train=[{tmp_path / 'train.jsonl'}]",
        f"data.dev=[{manifest}]",
        "data.normalizer=neutral",
        "data.speeds=[1.0]",
    ]
    plain = ["spec_augment.freq_masks=0", "spec_augment.time_masks=0", "loss.label_smoothing=0", "average=1"]
    settings = [*corpora, *plain, *short(3, 4), "model.encoder=transformer", "epochs=16", "validate_every=16"]
    model, _ = train(options(tmp_path, tmp_path / "exp", *settings))
    done = transcribe_cuts(asr.load(model, options=DecodeOptions(beam_size=2)), open_corpus(manifest))
    assert done.references[0] == REFERENCES[language]
    assert character_errors(done.references, done.hypotheses).rate == 0, done.hypotheses


def one_line(code: int, command, capsys, arguments: list, *words: str) -> None:
    """Asserts that a command ends with `code` and one line on standard error that contains all of `words`."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        command.main([str(argument) for argument in arguments])
    assert ended.value.code == code
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert all(word in lines[0] for word in words), lines[0]


def test_a_text_file_to_a_speech_model_is_one_line(files, capsys):
    (files / "notes.txt").write_text("Ceci n'est pas une pipe — du tout.\n")
    one_line(1, transcribe, capsys, ["--model", files / "model", files / "notes.txt"], "notes.txt", "text, not audio")


def test_sound_to_a_text_model_is_one_line(translator, corpus, capsys):
    _, model, _ = translator
    sound = corpus / "dev" / "0.wav"
    one_line(1, transcribe, capsys, ["--model", model, sound], "0.wav", "not text in UTF-8")
    one_line(2, transcribe, capsys, ["--model", model, "--channel", "0", sound], "channel is for sound")
    one_line(2, evaluate, capsys, ["--model", model, corpus / "dev"], "this is sound", "takes text")


def test_text_pairs_to_a_speech_model_are_one_line(translator, files, corpus, tmp_path, capsys):
    pairs = translator[0] / "dev.jsonl"
    one_line(2, evaluate, capsys, ["--model", files / "model", pairs], "this is text", "takes sound")
    with pytest.raises(ValueError, match=r"line 1 is text, and features\.kind=log_mel takes sound"):
        train(options(corpus, tmp_path / "exp", f"data.train=[{pairs}]", "data.min_seconds=0"))


def test_a_front_end_that_does_not_go_with_the_features_is_refused(corpus, tmp_path):
    with pytest.raises(ValueError, match=r"features\.kind=text and model\.subsampler=embedding"):
        train(options(corpus, tmp_path / "exp", "model.subsampler=embedding", "model.subsampling=1"))


def test_a_window_of_nothing_is_refused(corpus, tmp_path):
    with pytest.raises(ValueError, match="at least one frame besides its own"):
        options(corpus, tmp_path, "model.attention_left=0", "model.attention_right=0")


def test_a_matrix_of_another_width_is_one_line(tmp_path):
    for name, width in (("a", 12), ("b", 20)):
        np.save(tmp_path / f"{name}.npy", np.zeros((30, width)))
        (tmp_path / f"{name}.txt").write_text("abc")
    with pytest.raises(ValueError, match=r"^b: its matrix is 20 wide, and features\.dim=12$"):
        train(options(tmp_path, tmp_path / "exp", f"data.train=[{tmp_path}]", f"data.dev=[{tmp_path}]", *MATRICES))


def test_what_is_empty_after_normalisation_or_too_long_for_its_tokens_is_left_out(translator, tmp_path, caplog):
    folder, _, _ = translator
    pairs = [("?!", "un"), ("one", "un deux trois quatre cinq un deux"), ("two", "deux")]
    lines = [json.dumps({"id": f"p{i}", "source": s, "text": t}) for i, (s, t) in enumerate(pairs)]
    (tmp_path / "odd.jsonl").write_text("\n".join(lines) + "\n")
    corpora = [f"data.train=[{tmp_path / 'odd.jsonl'}]", f"data.dev=[{folder / 'dev.jsonl'}]"]
    train(options(folder, tmp_path / "exp", *corpora, *TEXT, *short(0.5, 3), "epochs=1"))
    assert "training set: left out p0: its source is empty after normalisation" in caplog.text
    assert "left out p1: 3 encoder frames are too few for 33 labels" in caplog.text
    assert "left out p2" not in caplog.text


def test_another_vocabulary_has_another_embedding(translator, tmp_path):
    _, model, _ = translator
    (tmp_path / "more.jsonl").write_text('{"source": "twelve wolves jump", "text": "douze loups sautent haut"}\n')
    corpora = [f"data.{name}=[{tmp_path / 'more.jsonl'}]" for name in ("train", "dev")]
    settings = [*corpora, *TEXT, *short(0.5, 3), f"init_from={model}", "new_tokenizer=true", "epochs=1"]
    before, after = asr.load(model).model, asr.load(train(options(tmp_path, tmp_path / "exp", *settings))[0]).model
    assert after.transformer.encoder.subsampling.table.num_embeddings == len(after.tokenizer) != len(before.tokenizer)


def test_inside_a_text_model_tokens_stand_against_tokens(translator):
    folder, model, _ = translator
    recognizer = asr.load(model)
    (piece,) = recognizer.pieces("three one")
    observation = observe(recognizer, piece.samples)
    assert observation.text == "trois un" and "".join(observation.source).replace("\u2423", " ") == "three one"
    (axes,) = plots.cross_attention(observation, 1, 1).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == list("three_one")
    (folder / "blank.txt").write_text("two\n\nfive\n")
    assert call("asr.transcribe", "--model", model, folder / "blank.txt").stdout.decode() == "deux\n\ncinq\n"
