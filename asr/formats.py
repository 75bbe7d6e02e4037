"""The output formats of a transcript: text, JSON, subtitles (SRT, WebVTT) and NIST's CTM."""

from __future__ import annotations

import html
import json
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from asr.text.words import join_words

if TYPE_CHECKING:
    from asr.decode.transcript import Segment, Transcript, Word

CUE_LETTERS = 84  # most in a subtitle: players show two lines of 42
CUE_SECONDS = 7.0
SHARES = [hundredths / 100 for hundredths in range(50, 100, 2)]  # of the longest subtitle, tried in turn
CUE_PAUSE = 0.7  # seconds without a word that end a subtitle
LINGER = 0.3  # seconds that a subtitle stays after its last word


class Cue(NamedTuple):
    """A subtitle."""

    start: float  # seconds
    end: float
    text: str


def cues(segments: list[Segment]) -> list[Cue]:
    """Subtitles of segments: split at pauses and before they grow too long if words have times, else one each."""
    found = [cue for segment in segments if segment.text for cue in _cues(segment)]
    if not found:
        return []
    stays = [min(cue.end + LINGER, after.start) for cue, after in pairwise(found)]
    stays.append(min(found[-1].end + LINGER, segments[-1].end))
    return [Cue(cue.start, max(cue.end, end), cue.text) for cue, end in zip(found, stays, strict=True)]


def _cues(segment: Segment) -> list[Cue]:
    if not segment.words or any(word.start is None for word in segment.words):
        return [Cue(segment.start, segment.end, segment.text)]
    starts = [i for i, (one, two) in enumerate(pairwise(segment.words), 1) if two.start - one.end >= CUE_PAUSE]
    parts = pairwise([0, *starts, len(segment.words)])
    return [cue for first, last in parts for cue in _balanced(segment.words[first:last])]


def _balanced(words: list[Word]) -> list[Cue]:
    """As few subtitles as there can be, of about equal length, so that no single word is left over for the last."""
    fewest = _packed(words, 1.0)
    shorter = (_packed(words, share) for share in SHARES)
    return next((cues for cues in shorter if len(cues) == len(fewest)), fewest)


def _packed(words: list[Word], share: float) -> list[Cue]:
    """Subtitles of as many words as fit into a `share` of the longest."""
    found: list[Cue] = []
    for word in words:
        if found:
            cue = found[-1]
            longer = Cue(cue.start, word.end, join_words([cue.text, word.text]))
            if longer.end - longer.start <= share * CUE_SECONDS and len(longer.text) <= share * CUE_LETTERS:
                found[-1] = longer
                continue
        found.append(Cue(word.start, word.end, word.text))
    return found


def _text(transcript: Transcript) -> str:
    return f"{transcript.text}\n"


def _json(transcript: Transcript) -> str:
    return json.dumps({"file": transcript.name, **as_dict(transcript)}, ensure_ascii=False) + "\n"


def as_dict(transcript: Transcript) -> dict:
    """Everything known about a transcript except its name, for JSON."""
    known: dict[str, object] = {}
    if transcript.error:
        known["error"] = transcript.error
    if transcript.segments or not transcript.error:
        segments = [segment_as_dict(segment) for segment in transcript.segments]
        known |= {"text": transcript.text, "duration": round(transcript.duration, 3)}
        known |= {"confidence": _rounded(transcript.confidence), "segments": segments}
    return known


def segment_as_dict(segment: Segment) -> dict:
    """Everything known about a segment, for JSON."""
    words = []
    for word in segment.words:
        times = {} if word.start is None else {"start": round(word.start, 3), "end": round(word.end, 3)}
        words.append({"word": word.text, "confidence": round(word.confidence, 4), **times})
    return {
        "start": round(segment.start, 3),
        "end": round(segment.end, 3),
        "text": segment.text,
        "score": round(segment.score, 4),
        "confidence": _rounded(segment.confidence),
        "words": words,
        "nbest": [{"text": text, "score": round(score, 4)} for text, score in segment.nbest],
    }


def _rounded(confidence: float | None) -> float | None:
    return None if confidence is None else round(confidence, 4)


def _srt(transcript: Transcript) -> str:
    numbered = enumerate(cues(transcript.segments), 1)
    return "\n".join(f"{number}\n{_lines(cue, ',')}" for number, cue in numbered)


def _vtt(transcript: Transcript) -> str:
    escaped = (cue._replace(text=html.escape(cue.text, quote=False)) for cue in cues(transcript.segments))
    return "\n".join(["WEBVTT\n", *(_lines(cue, ".") for cue in escaped)])


def _lines(cue: Cue, point: str) -> str:
    return f"{_clock(cue.start, point)} --> {_clock(cue.end, point)}\n{cue.text}\n"


def _ctm(transcript: Transcript) -> str:
    """The CTM lines; words without times share their segment equally."""
    lines = []
    for segment in transcript.segments:
        step = (segment.end - segment.start) / max(1, len(segment.words))
        for i, word in enumerate(segment.words):
            start = segment.start + i * step if word.start is None else word.start
            end = segment.start + (i + 1) * step if word.end is None else word.end
            lines.append(ctm_line(Path(transcript.name).stem, start, end, word.text, word.confidence))
    return "".join(lines)


def ctm_name(name: str) -> str:
    """The name of a recording in CTM, which has no spaces."""
    return "_".join(name.split()) or "_"


def ctm_line(name: str, start: float, end: float, word: str, confidence: float | None = None) -> str:
    """Recording, channel, start, duration, word and confidence, separated by spaces."""
    last = "" if confidence is None else f" {confidence:.4f}"
    begin, stop = round(start, 2), round(end, 2)  # rounded first, or the word could end after the next one starts
    return f"{ctm_name(name)} 1 {begin:.2f} {stop - begin:.2f} {word}{last}\n"


def _clock(seconds: float, point: str) -> str:
    minutes, milliseconds = divmod(round(1000 * seconds), 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{milliseconds // 1000:02d}{point}{milliseconds % 1000:03d}"


FORMATS = {"text": _text, "json": _json, "srt": _srt, "vtt": _vtt, "ctm": _ctm}
