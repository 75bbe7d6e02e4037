#!/usr/bin/env python3
"""Decoding compared with other toolkits: on the same machine, in one run, each in a process of its own.

    python benchmarks/decode.py search [--threads 1] [--utterances 1]
    python benchmarks/decode.py recognisers CORPUS [--weights DIR] [--threads 1] [--limit 100]
    python benchmarks/decode.py growth CORPUS [--threads 1] [--limit 100]

`search`: joint CTC/attention beam search on a model of the same size with random weights (12 + 6 layers, D 256, FFN
2048, 31 characters), 10 s of audio, 150 forced steps, encoder included. `recognisers`: complete recognisers with their
own weights on a corpus: seconds of audio per CPU second, peak memory, WER (both sides through our normaliser). DIR
holds `tiny.en.pt` (openai-whisper), `faster-whisper-tiny.en/`, `moonshine-tiny/`, `vosk-model-small-en-us-0.15/`.
`growth`: time and peak memory of our recogniser on the first utterances of a corpus, and on two and four times as many.

A row whose package or weights are missing says so. Packages: transformers, speechbrain, espnet; openai-whisper,
faster-whisper, useful-moonshine-onnx, vosk, pocketsphinx.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rows import measured

FRAMES, STEPS, VOCABULARY, REPEATS = 1003, 150, 31, 3
OURS = "asr"


def median_seconds(run: Callable[[], object]) -> float:
    """Median wall time of `REPEATS` runs after a warm-up run."""
    run()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


# --- search ---------------------------------------------------------------------------------------------------------


def search_ours(utterances: int, beam_size: int = 10, ctc_weight: float = 0.3, precision: str = "float32") -> float:
    import torch

    from asr.decode.beam import LOOKS, BeamSearch
    from asr.decode.options import DecodeOptions
    from asr.decode.precision import with_precision
    from asr.model.config import ModelConfig
    from asr.model.transformer import Transformer
    from asr.text.tokenizer import EOS

    model = Transformer(ModelConfig(vocab_size=VOCABULARY)).eval()
    with torch.no_grad():
        model.decoder.output.bias[EOS] = -1e4  # no hypothesis ends by itself
    with_precision(model, precision)
    X, X_lens = torch.randn(utterances, FRAMES, 80), torch.full((utterances,), FRAMES)
    options = DecodeOptions(beam_size=beam_size, ctc_weight=ctc_weight, max_repeats=10**6)

    @torch.inference_mode()
    def run() -> None:
        search = BeamSearch(model, *model.encoder(X, X_lens), options)
        for step in range(STEPS):
            search.advance(step)
            if (step + 1) % LOOKS["cpu"][1] == 0:  # as the search's own loop, which would end at some point
                search.compact()

    return median_seconds(run) / utterances


def search_espnet(utterances: int) -> float:
    import torch
    from espnet.nets.batch_beam_search import BatchBeamSearch
    from espnet.nets.scorers.ctc import CTCPrefixScorer
    from espnet2.asr.ctc import CTC
    from espnet2.asr.decoder.transformer_decoder import TransformerDecoder
    from espnet2.asr.encoder.transformer_encoder import TransformerEncoder

    encoder = TransformerEncoder(80, 256, 4, 2048, 12).eval()
    decoder = TransformerDecoder(VOCABULARY, 256, 4, 2048, 6).eval()
    ctc = CTC(VOCABULARY, 256).eval()
    eos = VOCABULARY - 1
    with torch.no_grad():
        decoder.output_layer.bias[eos] = -1e4
    search = BatchBeamSearch(
        beam_size=10,
        weights={"decoder": 0.7, "ctc": 0.3},
        scorers={"decoder": decoder, "ctc": CTCPrefixScorer(ctc, eos)},
        sos=eos,
        eos=eos,
        vocab_size=VOCABULARY,
        pre_beam_score_key="full",
    ).eval()
    X, X_lens = torch.randn(1, FRAMES, 80), torch.tensor([FRAMES])

    @torch.inference_mode()
    def run() -> None:
        for _ in range(utterances):  # ESPnet's search handles one utterance at a time
            memory = encoder(X, X_lens)[0][0]
            search(memory, maxlenratio=STEPS / len(memory), minlenratio=(STEPS - 1) / len(memory))

    return median_seconds(run) / utterances


def search_speechbrain(utterances: int) -> float:
    import torch
    from speechbrain.decoders.scorer import CTCScorer, ScorerBuilder
    from speechbrain.decoders.seq2seq import S2STransformerBeamSearcher
    from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR
    from speechbrain.nnet.linear import Linear

    from asr.model.config import ModelConfig
    from asr.model.subsampling import ConvSubsampling

    subsampling = ConvSubsampling(ModelConfig(vocab_size=VOCABULARY)).eval()
    model = TransformerASR(
        VOCABULARY, 256, d_model=256, nhead=4, num_encoder_layers=12, num_decoder_layers=6, d_ffn=2048, causal=False
    ).eval()
    output, ctc = Linear(input_size=256, n_neurons=VOCABULARY), Linear(input_size=256, n_neurons=VOCABULARY)
    blank, bos, eos = 0, 1, 2
    with torch.no_grad():
        output.w.bias[eos] = -1e4
    X, X_lens = torch.randn(utterances, FRAMES, 80), torch.full((utterances,), FRAMES)
    scorer = ScorerBuilder(weights={"ctc": 0.3}, full_scorers=[CTCScorer(ctc_fc=ctc, blank_index=blank, eos_index=eos)])

    @torch.inference_mode()
    def run() -> None:
        x, _ = subsampling(X, X_lens)
        relative = torch.ones(utterances)
        memory = model.encode(x, relative)
        ratio = STEPS / memory.shape[1]
        search = S2STransformerBeamSearcher(
            modules=[model, output],
            bos_index=bos,
            eos_index=eos,
            min_decode_ratio=ratio,
            max_decode_ratio=ratio,
            beam_size=10,
            scorer=scorer,
        )
        search(memory, relative)

    return median_seconds(run) / utterances


def search_transformers(utterances: int) -> float:
    import torch
    from transformers import Speech2TextConfig, Speech2TextForConditionalGeneration

    config = Speech2TextConfig(
        vocab_size=VOCABULARY,
        d_model=256,
        encoder_layers=12,
        encoder_ffn_dim=2048,
        encoder_attention_heads=4,
        decoder_layers=6,
        decoder_ffn_dim=2048,
        decoder_attention_heads=4,
        input_feat_per_channel=80,
        conv_channels=256,
        max_source_positions=2000,
        max_target_positions=400,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        decoder_start_token_id=1,
    )
    model = Speech2TextForConditionalGeneration(config).eval()
    X, mask = torch.randn(utterances, FRAMES, 80), torch.ones(utterances, FRAMES, dtype=torch.long)

    def run() -> None:
        model.generate(X, attention_mask=mask, num_beams=5, min_new_tokens=STEPS, max_new_tokens=STEPS, do_sample=False)

    return median_seconds(run) / utterances


SEARCHES: dict[str, Callable[[int], float]] = {
    f"{OURS}, beam 10, CTC": search_ours,
    f"{OURS}, beam 10, CTC, bfloat16": lambda n: search_ours(n, precision="bfloat16"),
    "ESPnet BatchBeamSearch, beam 10, CTC": search_espnet,
    "SpeechBrain S2STransformerBeamSearcher, beam 10, CTC": search_speechbrain,
    f"{OURS}, beam 5, no CTC": lambda n: search_ours(n, beam_size=5, ctc_weight=0.0),
    "transformers Speech2Text generate, beam 5, no CTC": search_transformers,
}


# --- recognisers ----------------------------------------------------------------------------------------------------


def samples(path: str):
    """The samples of a file, as float32."""
    import soundfile

    return soundfile.read(path, dtype="float32")[0]


def recognise_ours(paths: list[str], weights: Path) -> list[str]:
    import asr

    return [transcript.text for transcript in asr.load().transcribe_all(paths)]


def recognise_whisper(paths: list[str], weights: Path) -> list[str]:
    import whisper

    model = whisper.load_model(str(weights / "tiny.en.pt"), device="cpu")
    return [model.transcribe(samples(path), language="en", fp16=False)["text"] for path in paths]


def recognise_faster_whisper(paths: list[str], weights: Path) -> list[str]:
    from faster_whisper import WhisperModel

    threads = int(os.environ["OMP_NUM_THREADS"])
    folder = str(weights / "faster-whisper-tiny.en")
    model = WhisperModel(folder, device="cpu", compute_type="int8", cpu_threads=threads)
    found = (model.transcribe(samples(path), language="en", beam_size=5)[0] for path in paths)
    return [" ".join(segment.text for segment in segments) for segments in found]


def recognise_moonshine(paths: list[str], weights: Path) -> list[str]:
    from moonshine_onnx import MoonshineOnnxModel, load_tokenizer

    model, tokenizer = MoonshineOnnxModel(str(weights / "moonshine-tiny"), "tiny"), load_tokenizer()
    return [tokenizer.decode_batch(model.generate(samples(path)[None]))[0] for path in paths]


def recognise_vosk(paths: list[str], weights: Path) -> list[str]:
    from vosk import KaldiRecognizer, Model, SetLogLevel

    SetLogLevel(-1)
    model, texts = Model(str(weights / "vosk-model-small-en-us-0.15")), []
    for path in paths:
        recognizer = KaldiRecognizer(model, 16_000)
        recognizer.AcceptWaveform((samples(path) * 32767).astype("int16").tobytes())
        texts.append(json.loads(recognizer.FinalResult())["text"])
    return texts


def recognise_pocketsphinx(paths: list[str], weights: Path) -> list[str]:
    from pocketsphinx import Decoder

    decoder, texts = Decoder(samprate=16_000, loglevel="FATAL"), []
    for path in paths:
        decoder.start_utt()
        decoder.process_raw((samples(path) * 32767).astype("int16").tobytes(), full_utt=True)
        decoder.end_utt()
        hypothesis = decoder.hyp()
        texts.append(hypothesis.hypstr if hypothesis else "")
    return texts


RECOGNISERS: dict[str, Callable[[list[str], Path], list[str]]] = {
    f"{OURS}, the model that ships": recognise_ours,
    "moonshine tiny": recognise_moonshine,
    "faster-whisper tiny.en int8": recognise_faster_whisper,
    "openai-whisper tiny.en": recognise_whisper,
    "vosk small": recognise_vosk,
    "pocketsphinx en-us": recognise_pocketsphinx,
}


def recognise(name: str, folder: Path, weights: Path) -> dict:
    """The transcripts of the files of a folder, the CPU seconds used (start-up included), and the peak MiB."""
    texts = RECOGNISERS[name]([str(path) for path in sorted(folder.glob("*.wav"))], weights)
    used = time.process_time()
    # getrusage's peak would be that of the parent process
    (peak,) = (line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    return {"texts": texts, "used": used, "peak": int(peak) / 1024}


def write_sounds(corpus: str, limit: int, folder: Path) -> tuple[list[str], float]:
    """Writes the corpus as wav files into `folder`; returns their transcripts and their total seconds."""
    import soundfile

    from asr.corpus import iterate, open_corpus
    from asr.text.normalizer import english

    cuts = open_corpus(corpus).subset(first=limit) if limit else open_corpus(corpus)
    said, seconds = [], 0.0
    for i, (cut, sound) in enumerate(iterate(cuts)):
        soundfile.write(folder / f"{i:06d}.wav", sound, 16_000)
        said.append(english(cut.supervisions[0].text))
        seconds += cut.duration
    return said, seconds


# --- the tables -----------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = parser.add_subparsers(dest="table", required=True)
    tables.add_parser("search").add_argument("--utterances", type=int, default=1)
    whole = tables.add_parser("recognisers")
    whole.add_argument("corpus")
    whole.add_argument("--weights", type=Path, default=Path("weights"))
    whole.add_argument("--limit", type=int, default=0, help="utterances; 0: all")
    whole.add_argument("--sounds", type=Path, help=argparse.SUPPRESS)
    growth = tables.add_parser("growth")
    growth.add_argument("corpus")
    growth.add_argument("--limit", type=int, default=100, help="utterances to begin with")
    for table in tables.choices.values():
        table.add_argument("--threads", type=int, default=1)
        table.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row and args.table == "search":
        import torch

        import asr.audio._torchaudio  # noqa: F401 (lets the others import torchaudio with a CPU-only torch)

        torch.set_num_threads(args.threads)
        print(json.dumps({"seconds": SEARCHES[args.row](args.utterances)}))
    elif args.row:
        print(json.dumps(recognise(args.row, args.sounds, args.weights)))
    elif args.table == "search":
        print(f"| search, {args.utterances} at once, {args.threads} thread(s) | s an utterance |\n| --- | --- |")
        for name in SEARCHES:
            figures = measured([*sys.argv, "--row", name], args.threads)
            print(
                f"| {name} | {figures if isinstance(figures, str) else format(figures['seconds'], '.2f')} |", flush=True
            )
    elif args.table == "growth":
        print("| utterances | s of audio | CPU s | peak MiB |\n| --- | --- | --- | --- |")
        ours = [__file__, "recognisers", args.corpus, "--row", next(iter(RECOGNISERS))]
        for limit in (args.limit, 2 * args.limit, 4 * args.limit):
            with tempfile.TemporaryDirectory() as folder:
                said, seconds = write_sounds(args.corpus, limit, Path(folder))
                f = measured([*ours, "--sounds", folder], args.threads)
            cells = f if isinstance(f, str) else f"{f['used']:.1f} | {f['peak']:.0f}"
            print(f"| {len(said)} | {seconds:.0f} | {cells} |", flush=True)
    else:
        from asr.decode.scoring import word_errors
        from asr.text.normalizer import english

        print("| recogniser | s of audio per CPU second | peak MiB | WER % |\n| --- | --- | --- | --- |")
        with tempfile.TemporaryDirectory() as folder:
            said, seconds = write_sounds(args.corpus, args.limit, Path(folder))
            for name in RECOGNISERS:
                f = measured([*sys.argv, "--sounds", folder, "--row", name], args.threads)
                cells = f"{f} | | "
                if not isinstance(f, str):
                    wer = word_errors(said, [english(text) for text in f["texts"]]).rate
                    cells = f"{seconds / f['used']:.0f} | {f['peak']:.0f} | {wer:.1f}"
                print(f"| {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
