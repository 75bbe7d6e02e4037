"""A NeMo-style JSONL manifest, as a file next to its audio or as `manifest.jsonl` in a tar with the audio.

One JSON object per line: `audio_filepath` (relative to the manifest) and `text` (except for audio without transcripts)
are required; `id`, `speaker` and, for audio, `offset` and `duration` in seconds and a `channel`, from 0 on, are
optional. A line may have `source` instead of `audio_filepath`: an input text, for which a model is to write `text` (a
translation, for example).
"""

from __future__ import annotations

import json
import re
import sys
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from asr.audio.reading import read_lines
from asr.corpus.utterances import Utterance

_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON may name half of a character, which no file holds


def read_manifest(path: Path, transcribed: bool = True) -> Iterator[Utterance]:
    """The utterances of a JSONL manifest; an invalid line is an utterance with a fault."""
    for entry in _entries(read_lines(path), path, transcribed):
        if isinstance(entry, Utterance):
            yield entry
        elif _is_text(entry):
            yield Utterance(entry["id"], path, entry["text"], source=entry["source"])
        else:
            yield _utterance(entry, path.parent / entry["audio_filepath"])


def read_tar(path: Path, transcribed: bool = True) -> Iterator[Utterance]:
    """The utterances of a tar that holds `manifest.jsonl` and the audio. Nothing is unpacked."""
    try:
        with tarfile.open(path, "r:") as tar:
            members: dict[str, tarfile.TarInfo] = {}
            for member in tar:
                name, linked = member.name.removeprefix("./"), member.linkname.removeprefix("./")
                if member.islnk() and linked in members:  # a hard link comes after its file, whose content it has
                    members[name] = members[linked]
                elif member.isfile():
                    members[name] = member
            if "manifest.jsonl" not in members:
                raise ValueError(f"{path}: no manifest.jsonl in it")
            lines = list(read_lines(tar.extractfile(members["manifest.jsonl"]), str(path)))
    except tarfile.TarError as error:
        raise ValueError(f"{path}: not an uncompressed tar ({error})") from None
    for entry in _entries(lines, path, transcribed):
        if isinstance(entry, Utterance):
            yield entry
            continue
        if _is_text(entry):
            raise ValueError(f"{path}: text to text belongs in a plain manifest, not in a tar")
        member = members.get(entry["audio_filepath"].removeprefix("./"))
        utterance = _utterance(entry, path)
        # a missing member counts as an empty one, which is reported with the other bad files
        utterance.tar_offset, utterance.tar_size = (member.offset_data, member.size) if member else (0, 0)
        yield utterance


def _entries(lines: Iterable[str], path: Path, transcribed: bool) -> Iterator[dict[str, Any] | Utterance]:
    """The objects of the lines, each with an id and a text; for an invalid line, an utterance with its fault. Raises
    ValueError if the lines are together one list or one object."""
    written = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    for i, (number, line) in enumerate(written):
        if i == 0 and (line.lstrip().startswith("[") or line.rstrip().endswith(("{", "["))):
            raise ValueError(f"{path}: a manifest has one JSON object on each line (of a list, jq -c '.[]' makes one)")
        try:
            entry = json.loads(line)
            fault = _fault(entry, transcribed)
        except (ValueError, RecursionError) as error:  # also a number of thousands of digits, and endless brackets
            fault = f"not JSON ({getattr(error, 'msg', error)})"
        if fault:
            yield Utterance(f"line {number}", path, "", fault=fault)
            continue
        default = entry.get("audio_filepath") or f"{path.name} line {number}"
        if entry.get("offset") is not None:  # one of several utterances in a file
            default += f"-{entry['offset']}"
        if (channel := _channel(entry)) is not None:
            channel = int(channel)
            default += f"-channel{channel}"
        name = default if entry.get("id") in (None, "") else str(entry["id"])
        text = entry.get("text")  # may be anything where no transcript is needed
        yield entry | {"id": name, "text": text if isinstance(text, str) else "", "channel": channel}


def _fault(entry: Any, transcribed: bool) -> str | None:
    """What is wrong with a line of a manifest, or None."""
    if not isinstance(entry, dict):
        return "not a JSON object"
    for key in ("duration", "offset"):
        value = entry.get(key) or 0.0
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
            return f"{key} must be a number, 0 or more"
    channel = _channel(entry)
    if channel is not None and (isinstance(channel, bool) or channel < 0 or channel % 1):
        return "channel must be a whole number, 0 or more"
    needed = ["source" if _is_text(entry) else "audio_filepath", *(["text"] if transcribed else [])]
    wrong = [key for key in needed if not isinstance(entry.get(key), str)]
    if wrong and "supervisions" in entry:
        return "a cut of Lhotse's, which is read from .jsonl.gz only"
    if wrong:
        return " and ".join(f"no {key}" if entry.get(key) is None else f"{key} is not a string" for key in wrong)
    halves = (key for key in ("text", "source", "speaker") if _SURROGATE.search(str(entry.get(key) or "")))
    return next((f"half a character in its {key}" for key in halves), None)


def _channel(entry: dict[str, Any]) -> int | float | None:
    """The number of a channel; a text of that name is something else that is known of the recording."""
    channel = entry.get("channel")
    return channel if isinstance(channel, int | float) and not _is_text(entry) else None


def _is_text(entry: dict[str, Any]) -> bool:
    return "source" in entry and "audio_filepath" not in entry  # next to audio, it says where the audio is from


def _utterance(entry: dict[str, Any], path: Path) -> Utterance:
    duration, offset = entry.get("duration"), entry.get("offset")
    speaker = "" if entry.get("speaker") is None else str(entry["speaker"])
    return Utterance(entry["id"], path, entry["text"], speaker, duration, offset or 0.0, entry["channel"])
