"""What was tuned for a model, in its folder as `decoding.json`: options of the search, calibration of confidences."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from asr.decode.confidence import Calibration
from asr.decode.options import DecodeOptions
from asr.model.folder import ModelError

FILE = "decoding.json"


def save_tuning(folder: str | Path, options: DecodeOptions, calibration: Calibration | None) -> None:
    """Writes `folder / decoding.json`."""
    tuned = {"options": asdict(options), "calibration": calibration and asdict(calibration)}
    (Path(folder) / FILE).write_text(json.dumps(tuned, indent=2) + "\n", encoding="utf-8")


def load_tuning(folder: str | Path) -> tuple[DecodeOptions, Calibration | None]:
    """The options and the calibration of a model folder; the defaults and None where nothing was tuned.

    Raises ModelError where the file is damaged or of another version."""
    path = Path(folder) / FILE
    if not path.is_file():
        return DecodeOptions(), None
    try:
        tuned = json.loads(path.read_text(encoding="utf-8"))
        calibration = tuned["calibration"]
        return DecodeOptions(**tuned["options"]), calibration and Calibration(**calibration)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: not a tuning that this version reads ({error})") from None
