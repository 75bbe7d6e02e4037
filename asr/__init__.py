"""Speech recognition with a Transformer encoder-decoder.

>>> import asr
>>> recognizer = asr.load()                       # the model that ships; or asr.load("exp/digits/model")
>>> recognizer.transcribe("file.wav").text
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from asr.decode.recognizer import Recognizer

__version__ = "0.1.0"


def load(model: str | Path | None = None, device: str | None = None, **settings) -> Recognizer:
    """The recogniser of a model folder (None: the model that ships) on a device (None: a GPU if there is one).

    "whisper:PATH" names another toolkit's checkpoint, as imported by `asr.model.foreign`.
    `settings` are the arguments of asr.decode.recognizer.Recognizer and any fields of
    asr.decode.options.DecodeOptions (`beam_size`, `nbest`, `lm_weight`, `phrases`, ...); the fields that are not given
    keep the values tuned for the model.

    Raises asr.model.folder.ModelError."""
    from asr.decode.recognizer import Recognizer  # `import asr` itself loads nothing

    return Recognizer.load(model, device, **settings)
