#!/usr/bin/env python3
"""Training steps beside other toolkits: the same dimensions, batches and loss, on the same machine, in one run.

    python benchmarks/train.py [--threads 1] [--rounds 3] [--device cpu]

The model is 12 + 6 layers, D 256, 4 heads, FFN 2048, 31 characters, dropout 0.1, behind the same convolutional
subsampler; a step is forward, 0.3 CTC + 0.7 cross-entropy with label smoothing, backward, clipping and AdamW, over
batches of 120 s of sound with utterances of 4, 10 and 15 s. Each row runs in a process of its own, the rows take turns,
and the table shows medians over the rounds. Utilisation is what the matrix products of the model (counted by torch on
ours, forward and backward) take of what one large matrix product reaches there in the same precision.

A row whose package (speechbrain) is not here says so; where the hardware is not quick at bfloat16, which then takes
hours, there are no rows of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

from rows import measured

VOCABULARY, DROPOUT = 31, 0.1
BATCHES = ((30, 4), (12, 10), (8, 15))  # utterances, seconds of each
CHARACTERS_A_SECOND = 14
WARM_UP, STEPS = 1, 3  # passes over the batches


def batches(device: str) -> list[tuple]:
    """X `(B, T, 80)`, X_lens, Y `(B, U)`, Y_lens of each batch; all utterances of a batch are equally long."""
    import torch

    found = []
    for utterances, seconds in BATCHES:
        X = torch.randn(utterances, 100 * seconds, 80)
        Y = torch.randint(4, VOCABULARY, (utterances, CHARACTERS_A_SECOND * seconds))
        lens = [torch.full((utterances,), n) for n in (X.shape[1], Y.shape[1])]
        found.append(tuple(x.to(device) for x in (X, lens[0], Y, lens[1])))
    return found


def ours():
    """The model, and its loss of a batch."""
    from asr.model import ModelConfig, Transformer
    from asr.training.config import LossConfig
    from asr.training.loss import joint_loss

    model = Transformer(ModelConfig(vocab_size=VOCABULARY, dropout=DROPOUT))
    config = LossConfig(ctc_weight=0.3, intermediate_ctc=0)
    return model, lambda X, X_lens, Y, Y_lens: joint_loss(model(X, X_lens, Y, Y_lens), Y, Y_lens, config).total


def speechbrain():
    import torch
    from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR
    from speechbrain.nnet.linear import Linear
    from speechbrain.nnet.losses import ctc_loss, kldiv_loss

    from asr.model import ModelConfig
    from asr.model.subsampling import ConvSubsampling

    model = torch.nn.ModuleDict(
        {
            "subsampling": ConvSubsampling(ModelConfig(vocab_size=VOCABULARY)),
            "transformer": TransformerASR(
                VOCABULARY,
                256,
                d_model=256,
                nhead=4,
                num_encoder_layers=12,
                num_decoder_layers=6,
                d_ffn=2048,
                dropout=DROPOUT,
                normalize_before=True,
                causal=False,
            ),
            "output": Linear(input_size=256, n_neurons=VOCABULARY),
            "ctc": Linear(input_size=256, n_neurons=VOCABULARY),
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


def torch_transformer():
    import torch

    from asr.model import ModelConfig
    from asr.model.positions import sinusoids
    from asr.model.subsampling import ConvSubsampling

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.subsampling = ConvSubsampling(ModelConfig(vocab_size=VOCABULARY))
            self.embedding = torch.nn.Embedding(VOCABULARY, 256)
            self.transformer = torch.nn.Transformer(256, 4, 12, 6, 2048, DROPOUT, batch_first=True, norm_first=True)
            self.output, self.ctc = torch.nn.Linear(256, VOCABULARY), torch.nn.Linear(256, VOCABULARY)

        def forward(self, X, X_lens, Y_in):
            x, lens = self.subsampling(X, X_lens)
            padding = torch.arange(x.shape[1], device=x.device) >= lens[:, None]
            y = self.embedding(Y_in)
            x, y = (16 * part + sinusoids(part.shape[1], 256, device=x.device) for part in (x, y))
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


TOOLKITS: dict[str, Callable] = {"asr": ours, "SpeechBrain": speechbrain, "torch.nn.Transformer": torch_transformer}
PRECISIONS = ("float32", "bfloat16")


def measure(toolkit: str, precision: str, device: str) -> dict:
    """Seconds of sound trained on a second, the model's FLOP of that, and what a large matrix product reaches."""
    import torch

    from asr.heap import keep_freed_blocks

    model, loss = TOOLKITS[toolkit]()
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=toolkit == "asr" or device == "cuda")
    if toolkit == "asr" and device == "cpu":  # as its trainer does
        keep_freed_blocks()
    dtype, data = getattr(torch, precision), batches(device)

    def step(batch: tuple) -> None:
        with torch.autocast(device, dtype, enabled=precision != "float32"):
            total = loss(*batch)
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()

    seconds = timed(lambda: [step(batch) for batch in data], WARM_UP, STEPS, device)
    sound = sum(utterances * length for utterances, length in BATCHES)
    return {
        "rate": sound / seconds,
        "peak": peak(dtype, device),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def timed(run: Callable[[], object], warm_up: int, repeats: int, device: str) -> float:
    """Median seconds of a run."""
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
    """FLOP a second of one large matrix product."""
    import torch

    n = 2048 if device == "cpu" else 8192
    a = torch.randn(n, n, device=device, dtype=dtype)
    return 2 * n**3 / timed(lambda: a @ a, 2, 5, device)


def flop() -> float:
    """Of the matrix products of our model, forward and backward, over all batches."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    _, loss = ours()
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        for batch in batches("cpu"):
            loss(*batch).backward()
    return counter.get_total_flops()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        import asr.audio._torchaudio  # noqa: F401 (lets SpeechBrain import torchaudio beside a CPU-only torch)

        print(json.dumps(measure(*args.row, args.device)))
        return
    from asr.decode.precision import best_precision

    precisions = PRECISIONS if best_precision(args.device) == "bfloat16" else ("float32",)
    rows = [(toolkit, precision) for toolkit in TOOLKITS for precision in precisions]
    found: dict[tuple[str, str], list] = {name: [] for name in rows}
    for _ in range(args.rounds):
        for name in rows:
            found[name].append(measured([__file__, "--device", args.device, "--row", *name], args.threads))
    work = flop() / sum(utterances * length for utterances, length in BATCHES)
    print(f"{work / 1e9:.1f} GFLOP a second of sound; {args.threads} thread(s) on {args.device}\n")
    print("| model | precision | M parameters | s of sound a second | utilisation % |\n| --- | --- | --- | --- | --- |")
    for (toolkit, precision), figures in found.items():
        if any(isinstance(f, str) for f in figures):
            print(f"| {toolkit} | {precision} | {next(f for f in figures if isinstance(f, str))} | | |")
            continue
        rate, best = (statistics.median(f[key] for f in figures) for key in ("rate", "peak"))
        cells = f"{figures[0]['parameters'] / 1e6:.1f} | {rate:.1f} | {100 * rate * work / best:.0f}"
        print(f"| {toolkit} | {precision} | {cells} |")


if __name__ == "__main__":
    main()
