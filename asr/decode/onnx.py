"""A recogniser as ONNX graphs, for programs without PyTorch: ONNX Runtime supports C++, C#, Java, JavaScript and more.

`encoder.onnx` turns audio into what the decoder attends to, `decoder.onnx` runs one step of every hypothesis, and
`description.json` holds what else a search needs. `docs/onnx.md` describes how to use them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from asr.audio.reading import SAMPLE_RATE
from asr.decode.alignment import frame_times
from asr.decode.ctc import hears_something
from asr.decode.graphs import DecoderGraph, EncoderGraph, takes
from asr.decode.recognizer import Recognizer
from asr.decode.recordings import random_inputs
from asr.text.loading import save_tokenizer
from asr.text.tokenizer import BLANK, SPECIALS, UNK

ENCODER, DECODER, DESCRIPTION = "encoder.onnx", "decoder.onnx", "description.json"
UNFINISHED = ".unfinished"  # a folder within the exported one, until all is written
SOURCE = {"sound": "samples", "matrix": "features", "text": "text"}  # the name of the encoder's input
UNWRITTEN = {SPECIALS[UNK]: "\ufffd"}  # how the token is decoded
TOLERANCE = 1e-2  # largest difference that log-posteriors may have from the model's


class ExportError(RuntimeError):
    """Raised for graphs that do not compute what the model does."""


def describe(recognizer: Recognizer) -> dict[str, Any]:
    """What a search needs to know in addition to the graphs."""
    model, config = recognizer.model, recognizer.model.transformer.config
    features = model.front_end.config
    described: dict[str, Any] = {"takes": takes(model)}
    if features.takes != "text":
        begins, step = frame_times(model)
        described |= {"first_frame_begins": begins, "seconds_per_frame": step}
    if features.takes == "sound":
        longest = recognizer.piece_seconds
        if config.positions == "learned" and not recognizer.window:
            longest = min(longest, (config.max_positions - 1) * step)
        described |= {"sample_rate": SAMPLE_RATE, "longest_seconds": longest}
    if described["takes"] == "matrix":
        described["features_dim"] = features.dim
    return described | {
        "decoder_layers": config.decoder_layers,
        "num_heads": config.num_heads,
        "key_dim": config.key_dim,
        "value_dim": config.value_dim,
        "prompt": config.prompt,
        "eos": config.eos,
        "blank": BLANK if config.ctc else None,
        "suppressed": config.suppressed,
        "suppressed_first": config.suppressed_first,
        "first_timestamp": config.first_timestamp,
        "tokens_per_frame": config.tokens_per_frame,
        "longest_transcript": config.longest_transcript,
        "tokens": [UNWRITTEN.get(piece, piece) for piece in map(model.tokenizer.piece, range(config.vocab_size))],
    }


def export_onnx(recognizer: Recognizer, folder: str | Path, int8: bool = False) -> float:
    """Writes the graphs, the description and the tokenizer's file to a new or empty folder. The recogniser's model must
    be in float32 and on the CPU, and no other thread may use torch meanwhile. With `int8` the graphs multiply integers.
    Returns the largest difference between the log-posteriors of the graphs and the model's.

    Raises ValueError if the folder is not empty, or onnx, onnxscript or onnxruntime is missing; ExportError if the
    graphs do not compute what the model does."""
    check_export(folder)
    folder = Path(folder)
    unfinished = folder / UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
    unfinished.mkdir(parents=True)
    try:
        _write_graphs(recognizer, unfinished)
        graphs = [unfinished / name for name in (ENCODER, DECODER)]
        most = difference(recognizer, *map(_session, graphs))
        if not most <= TOLERANCE:
            raise ExportError(f"the graphs differ from the model by {most:.2g}")
        if int8:
            for path in graphs:
                _quantize(path)
            most = difference(recognizer, *map(_session, graphs))
        (unfinished / DESCRIPTION).write_text(json.dumps(describe(recognizer)) + "\n", encoding="utf-8")
        save_tokenizer(recognizer.model.tokenizer, unfinished)
        for path in unfinished.iterdir():
            path.replace(folder / path.name)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return most


def check_export(folder: str | Path) -> None:
    """Raises ValueError if the folder is not empty, but for what a killed process has left, or a library is missing;
    OSError if it is not a folder. To be called before a model is loaded."""
    if Path(folder).exists() and any(path.name != UNFINISHED for path in Path(folder).iterdir()):
        raise ValueError(f"{folder} is not empty: choose another folder")
    try:
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ValueError(f"{error.name} is missing: pip install '.[onnx]'") from None


def _write_graphs(recognizer: Recognizer, folder: Path) -> None:
    model = recognizer.model
    encoder, decoder = EncoderGraph(model).eval(), DecoderGraph(model).eval()
    sounds = _graph_inputs(recognizer, random_inputs(model, [round(s * recognizer.rate) for s in (1.5, 1.2)]))
    axes = {SOURCE[encoder.takes]: {0: "B", 1: "N"}, "lens": {0: "B"}}
    outputs = ["memory_lens", "cross_keys", "cross_values", *(["ctc_log_probs"] if model.transformer.ctc else [])]
    _write(folder / ENCODER, encoder, sounds, axes, outputs)
    memory_lens, keys, values, *_ = encoder(*sounds)
    past = [x.new_zeros(*x.shape[:3], 6, x.shape[4]) for x in (keys, values)]  # two steps of three hypotheses
    tokens, hidden = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, 6, dtype=torch.bool)
    step = (tokens, *past, hidden, keys, values, memory_lens)
    axes = {"tokens": {0: "B", 1: "W"}, "past_keys": {1: "B", 3: "S"}, "past_values": {1: "B", 3: "S"}}
    axes |= {"hidden": {0: "B", 1: "W", 2: "S"}, "cross_keys": {1: "B", 3: "M"}, "cross_values": {1: "B", 3: "M"}}
    axes |= {"memory_lens": {0: "B"}}
    _write(folder / DECODER, decoder, step, axes, ["log_probs", "keys", "values", "hidden_after"])


def _write(
    path: Path, graph: nn.Module, inputs: tuple[Tensor, ...], axes: dict[str, dict[int, str]], outputs: list[str]
) -> None:
    """Writes the graph that `inputs` take through the module; their `axes` can have any size."""
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    with _quiet(), torch.enable_grad():  # which subsamples audio as a whole, and makes attention plain products
        program = torch.onnx.export(
            graph,
            inputs,
            input_names=list(axes),
            output_names=outputs,
            dynamic_shapes=tuple(axes.values()),
            dynamo=True,
            verbose=False,
        )
    ClearMetadataAndDocStringPass()(program.model)  # the file and line that each node comes from
    program.save(path)


def _quantize(path: Path) -> None:
    """Quantises the weights of the graph's matrix products to int8 by ONNX Runtime; what is multiplied with them is
    quantised at run time."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with _quiet():
        quantize_dynamic(path, path, weight_type=QuantType.QInt8, op_types_to_quantize=["MatMul", "Gemm"])
    path.with_name(f"{path.name}.data").unlink(missing_ok=True)  # of more than 2 GB; the new graph has its own weights


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses the warnings and log messages of libraries meanwhile."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _session(path: Path) -> Callable[..., list[Tensor]]:
    """A graph as a function of tensors."""
    from onnxruntime import InferenceSession

    session = InferenceSession(path)
    names = [each.name for each in session.get_inputs()]

    def run(*inputs: Tensor) -> list[Tensor]:
        outputs = session.run(None, {name: x.numpy() for name, x in zip(names, inputs, strict=True)})
        return [torch.from_numpy(x) for x in outputs]

    return run


@torch.inference_mode()
def difference(
    recognizer: Recognizer, encoder: Callable[..., Sequence[Tensor]], decoder: Callable[..., Sequence[Tensor]]
) -> float:
    """The largest difference between the log-posteriors of two graphs and the model's, with batches of other sizes than
    the graphs were made with, and hypotheses that change places; infinity if the lengths differ."""
    transformer, found = recognizer.model.transformer, []
    for seconds in ([0.9, 2.0, 1.4], [0.05]):
        inputs = random_inputs(recognizer.model, [round(s * recognizer.rate) for s in seconds])
        memory, lens = recognizer.encode(inputs)
        heard, keys, values, *ctc = encoder(*_graph_inputs(recognizer, inputs))
        (L, B, H), W, expected = keys.shape[:3], 2, lens
        for theirs in (x[:, : memory.shape[1]] for x in ctc):
            expected = lens.masked_fill(~hears_something(theirs, lens), 0)
            found.append(transformer.ctc_log_probs(memory) - theirs)
        if not torch.equal(heard, expected):
            return math.inf
        past = [x.new_zeros(L, B, H, 0, x.shape[4]) for x in (keys, values)]
        hidden, state = torch.zeros(B, W, 0, dtype=torch.bool), transformer.decoder.start(memory, lens, W)
        parents = torch.tensor([[1, 0], [0, 0], [1, 1]])[:B]
        for step in range(3):
            tokens = (torch.arange(B * W).view(B, W) + step) % transformer.config.vocab_size
            ours, state = transformer.decoder.step(tokens, state)
            theirs, *past, hidden = decoder(tokens, *past, hidden, keys, values, lens)
            found.append(ours - theirs)
            state, hidden = state.reorder(parents), hidden[torch.arange(B)[:, None], parents]
    return float(torch.cat([x.abs().flatten() for x in found]).max())  # NaN if any is


def _graph_inputs(recognizer: Recognizer, inputs: list[np.ndarray]) -> tuple[Tensor, Tensor]:
    """The batch as the encoder's graph expects it, and its lengths."""
    batch = pad_sequence([torch.from_numpy(x) for x in inputs], batch_first=True)
    lens, front_end = torch.tensor([len(x) for x in inputs]), recognizer.model.front_end
    return front_end.extract(batch, lens) if front_end.config.kind == "kaldi" else (batch, lens)
