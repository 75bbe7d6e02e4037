#!/usr/bin/env python3
"""Training steps compared with other toolkits: the same dimensions, batches and loss, on the same machine, in one run.

    python benchmarks/train.py [--threads 1] [--rounds 3]
    python benchmarks/train.py --device cuda --model base --seconds 2400 --lengths 15

The model is a preset, with 31 characters and dropout 0.1: small (12 + 6 layers, D 256, 4 heads, FFN 2048, pre-norm) or
base (6 + 6 layers, D 512, 8 heads, FFN 2048, post-norm), behind the same convolutional subsampler; a step is forward,
0.3 CTC + 0.7 cross-entropy with label smoothing, backward, clipping and AdamW, over batches of `--seconds` of audio,
whose utterances have 4, 10 and 15 s in turn (`--lengths`). Each row runs in a process of its own, the rows take turns,
and the table shows medians over the rounds. Utilisation is the FLOP rate of the model's matrix products (counted by
torch on ours, forward and backward) relative to that of one large matrix product in the same precision.

A row whose package (speechbrain) is missing says so. On hardware that is not fast at bfloat16, where it takes hours,
there are no bfloat16 rows; on a GPU that is fast at it, there are only those, one of them ours with compiled layers.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from rows import measured

if TYPE_CHECKING:
    from asr.model.config import ModelConfig

VOCABULARY, DROPOUT = 31, 0.1
CHARACTERS_A_SECOND = 14
WARM_UP, STEPS = 1, 3  # passes over the batches


def batches(together: int, lengths: list[int], device: str) -> list[tuple]:
    """For each utterance length, a batch of `together` seconds: X `(B, T, 80)`, X_lens, Y `(B, U)`, Y_lens."""
    import torch

    found = []
    for seconds in lengths:
        utterances = together // seconds
        X = torch.randn(utterances, 100 * seconds, 80)
        Y = torch.randint(4, VOCABULARY, (utterances, CHARACTERS_A_SECOND * seconds))
        lens = [torch.full((utterances,), n) for n in (X.shape[1], Y.shape[1])]
        found.append(tuple(x.to(device) for x in (X, lens[0], Y, lens[1])))
    return found


def sound_of(data: list[tuple]) -> float:
    """Seconds of audio in all batches."""
    return sum(X.shape[0] * X.shape[1] / 100 for X, *_ in data)


def ours(config: ModelConfig, compiled: bool = False):
    """The model, and the function that computes its loss on a batch."""
    from asr.model.transformer import Transformer
    from asr.training.base import compile_layers
    from asr.training.config import LossConfig
    from asr.training.loss import joint_loss, lens_for_ctc

    model = Transformer(config)
    if compiled:
        compile_layers(model)
    config = LossConfig(ctc_weight=0.3, intermediate_ctc=0)

    def loss(X, X_lens, Y, Y_lens):
        take_lens = lens_for_ctc(model, X_lens, Y_lens)
        return joint_loss(model(X, X_lens, Y, Y_lens), Y, Y_lens, config, take_lens=take_lens).total

    return model, loss


def speechbrain(config: ModelConfig):
    import torch
    from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR
    from speechbrain.nnet.linear import Linear
    from speechbrain.nnet.losses import ctc_loss, kldiv_loss

    from asr.model.subsampling import ConvSubsampling

    D = config.d_model
    model = torch.nn.ModuleDict(
        {
            "subsampling": ConvSubsampling(config),
            "transformer": TransformerASR(
                VOCABULARY,
                D,
                d_model=D,
                nhead=config.num_heads,
                num_encoder_layers=config.encoder_layers,
                num_decoder_layers=config.decoder_layers,
                d_ffn=config.ffn_dim,
                dropout=DROPOUT,
                normalize_before=config.norm_first,
                causal=False,
            ),
            "output": Linear(input_size=D, n_neurons=VOCABULARY),
            "ctc": Linear(input_size=D, n_neurons=VOCABULARY),
        }
    )

    def loss(X, X_lens, Y, Y_lens):
        x, _ = model["subsampling"](X, X_lens)
        relative = torch.ones(len(X), device=X.device)
        Y_in = torch.nn.functional.pad(Y, (1, 0), value=1)
        memory, decoded = model["transformer"](x, Y_in, relative, pad_idx=0)
        ctc = ctc_loss(model["ctc"](memory).float().log_softmax(-1), Y, relative, relative, 0)
        log_probs = model["output"](decoded).float().log_softmax(-1)
        Y_out = torch.nn.functional.pad(Y, (0, 1), value=2)
        return 0.3 * ctc + 0.7 * kldiv_loss(log_probs, Y_out, length=relative, label_smoothing=0.1)

    return model, loss


def torch_transformer(config: ModelConfig):
    import torch

    from asr.model.positions import sinusoids
    from asr.model.subsampling import ConvSubsampling

    D = config.d_model

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.subsampling = ConvSubsampling(config)
            self.embedding = torch.nn.Embedding(VOCABULARY, D)
            depths = config.encoder_layers, config.decoder_layers
            options = {"batch_first": True, "norm_first": config.norm_first}
            self.transformer = torch.nn.Transformer(D, config.num_heads, *depths, config.ffn_dim, DROPOUT, **options)
            self.output, self.ctc = torch.nn.Linear(D, VOCABULARY), torch.nn.Linear(D, VOCABULARY)

        def forward(self, X, X_lens, Y_in):
            x, lens = self.subsampling(X, X_lens)
            padding = torch.arange(x.shape[1], device=x.device) >= lens[:, None]
            y = self.embedding(Y_in)
            x, y = (D**0.5 * part + sinusoids(part.shape[1], D, device=x.device) for part in (x, y))
            memory = self.transformer.encoder(x, src_key_padding_mask=padding)
            future = torch.ones(y.shape[1], y.shape[1], dtype=torch.bool, device=x.device).triu(1)
            y = self.transformer.decoder(y, memory, future, memory_key_padding_mask=padding, tgt_is_causal=True)
            return self.output(y), self.ctc(memory), lens

    model, cross_entropy = Model(), torch.nn.CrossEntropyLoss(label_smoothing=0.1)

    def loss(X, X_lens, Y, Y_lens):
        output, ctc, lens = model(X, X_lens, torch.nn.functional.pad(Y, (1, 0), value=1))
        log_probs = ctc.float().log_softmax(-1).transpose(0, 1)
        ctc = torch.nn.functional.ctc_loss(log_probs, Y, lens, Y_lens)
        Y_out = torch.nn.functional.pad(Y, (0, 1), value=2)
        return 0.3 * ctc + 0.7 * cross_entropy(output.float().transpose(1, 2), Y_out)

    return model, loss


TOOLKITS: dict[str, Callable] = {
    "asr": ours,
    "asr, compiled": partial(ours, compiled=True),
    "SpeechBrain": speechbrain,
    "torch.nn.Transformer": torch_transformer,
}


def preset(name: str) -> ModelConfig:
    from asr.model.config import ModelConfig

    return ModelConfig.preset(name, vocab_size=VOCABULARY, dropout=DROPOUT)


def measure(toolkit: str, precision: str, args: argparse.Namespace) -> dict:
    """Seconds of audio per second, FLOP/s of a large matrix product, GiB on a GPU, and the number of parameters."""
    import torch

    from asr.heap import keep_freed_blocks
    from asr.model.dot_product import leave_out_cudnn

    device = args.device
    model, loss = TOOLKITS[toolkit](preset(args.model))
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=toolkit.startswith("asr") or device == "cuda")
    if toolkit.startswith("asr"):  # as our trainer does
        (keep_freed_blocks if device == "cpu" else leave_out_cudnn)()
    dtype, data = getattr(torch, precision), batches(args.seconds, args.lengths, device)

    def step(batch: tuple) -> None:
        with torch.autocast(device, dtype, enabled=precision != "float32"):
            total = loss(*batch)
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()

    seconds = timed(lambda: [step(batch) for batch in data], WARM_UP, STEPS, device)
    return {
        "rate": sound_of(data) / seconds,
        "peak": peak(dtype, device),
        "memory": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def timed(run: Callable[[], object], warm_up: int, repeats: int, device: str) -> float:
    """Median seconds of a run after the warm-up."""
    import torch

    times = []
    for _ in range(warm_up + repeats):
        started = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[warm_up:])


def peak(dtype, device: str) -> float:
    """FLOP per second of one large matrix product."""
    import torch

    n = 2048 if device == "cpu" else 8192
    a = torch.randn(n, n, device=device, dtype=dtype)
    return 2 * n**3 / timed(lambda: a @ a, 2, 5, device)


def flop(config: ModelConfig, lengths: list[int]) -> float:
    """FLOP of our model's matrix products, forward and backward, per second of audio."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    _, loss = ours(config)
    data = batches(math.lcm(*lengths), lengths, "cpu")  # the same amount of each length
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        for batch in data:
            loss(*batch).backward()
    return counter.get_total_flops() / sound_of(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--model", default="small", choices=("small", "base"))
    parser.add_argument("--seconds", type=int, default=120, help="of sound in a batch")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4, 10, 15], help="of its utterances, in turn")
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.seconds < max(args.lengths):
        parser.error("--seconds: a batch has at least one utterance")
    if args.row:
        import asr.audio._torchaudio  # noqa: F401 (lets SpeechBrain import torchaudio with a CPU-only torch)

        print(json.dumps(measure(*args.row, args)))
        return
    from asr.model.autocast import best_precision

    on_gpu = args.device == "cuda"
    precisions = ["bfloat16"] if best_precision(args.device) == "bfloat16" else []
    precisions = precisions if on_gpu and precisions else ["float32", *precisions]
    toolkits = [toolkit for toolkit in TOOLKITS if on_gpu or toolkit != "asr, compiled"]
    rows = [(toolkit, precision) for toolkit in toolkits for precision in precisions]
    batch = [f"--seconds={args.seconds}", "--lengths", *map(str, args.lengths)]
    options = [f"--device={args.device}", f"--model={args.model}", *batch]
    found: dict[tuple[str, str], list] = {name: [] for name in rows}
    for _ in range(args.rounds):
        for name in rows:
            found[name].append(measured([__file__, *options, "--row", *name], args.threads))
            print(*name, found[name][-1], file=sys.stderr, flush=True)
    work = flop(preset(args.model), args.lengths)
    print(f"{work / 1e9:.2f} GFLOP per second of audio; {args.threads} thread(s) on {args.device}\n")
    print("| model | precision | M parameters | s of audio per second | utilisation % | GiB |\n|" + " --- |" * 6)
    for (toolkit, precision), figures in found.items():
        if any(isinstance(f, str) for f in figures):
            print(f"| {toolkit} | {precision} | {next(f for f in figures if isinstance(f, str))} | | | |")
            continue
        rate, best = (statistics.median(f[key] for f in figures) for key in ("rate", "peak"))
        memory = f"{figures[0]['memory']:.1f}" if on_gpu else ""
        cells = f"{figures[0]['parameters'] / 1e6:.1f} | {rate:.1f} | {100 * rate * work / best:.1f} | {memory}"
        print(f"| {toolkit} | {precision} | {cells} |")


if __name__ == "__main__":
    main()
