"""The settings that were tuned for a model, in its folder: `decoding.json` (options of the search, calibration of
confidences, whether to use int8, the length to which long recordings are cut), and `lm`, the folder of the language
model that goes with it.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from asr.decode.confidence import Calibration
from asr.decode.options import DecodeOptions
from asr.model.folder import ModelError, write_json

TUNING, LANGUAGE_MODEL = "decoding.json", "lm"


class Tuning(NamedTuple):
    """The tuned settings; the fields are named like the arguments of `Recognizer`."""

    options: DecodeOptions | None = None  # None: the defaults
    calibration: Calibration | None = None
    language_model: Path | None = None  # its folder
    int8: bool = False  # where the hardware supports it
    piece_seconds: float | None = None  # to which long recordings are cut; None: the default of `Recognizer`


def save_tuning(
    folder: str | Path,
    options: DecodeOptions,
    calibration: Calibration | None = None,
    language_model: str | Path | None = None,
    int8: bool = False,
    piece_seconds: float | None = None,
) -> None:
    """Writes `folder / decoding.json` and copies the folder of the language model to `folder / lm`."""
    inside = Path(folder) / LANGUAGE_MODEL
    if language_model and Path(language_model).resolve() != inside.resolve():
        shutil.copytree(language_model, inside, dirs_exist_ok=True)
    tuned = {"options": asdict(options), "calibration": calibration and asdict(calibration), "int8": int8}
    tuned |= {"piece_seconds": piece_seconds} if piece_seconds else {}
    write_json(tuned, Path(folder) / TUNING)


def load_tuning(folder: str | Path) -> Tuning:
    """The tuned settings in a model folder; the defaults if nothing was tuned.

    Raises ModelError if the file is damaged or was written by another version."""
    path, inside = Path(folder) / TUNING, Path(folder) / LANGUAGE_MODEL
    language_model = inside if inside.is_dir() else None
    if not path.is_file():
        return Tuning(language_model=language_model)
    try:
        tuned = json.loads(path.read_text(encoding="utf-8"))
        calibration = tuned["calibration"]
        options = DecodeOptions(**tuned["options"])
        calibration = calibration and Calibration(**{name: float(weight) for name, weight in calibration.items()})
        piece_seconds = tuned.get("piece_seconds")
        piece_seconds = None if piece_seconds is None else float(piece_seconds)
        return Tuning(options, calibration, language_model, bool(tuned.get("int8")), piece_seconds)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: not a tuning that this version can read ({error})") from None
