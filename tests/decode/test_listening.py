"""Audio that is still coming in: what is known of it, and when."""

import queue
import threading
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from asr.audio.reading import SAMPLE_RATE, AudioError
from asr.decode import listening
from asr.decode.listening import _Draft, drafter_of, drained, listen
from asr.decode.options import DecodeOptions, Hypothesis
from asr.decode.recognizer import Recognizer
from asr.decode.segments import Piece
from asr.decode.sharing import SharedRecognizer
from asr.model.config import ModelConfig
from asr.model.speech_model import SpeechModel
from asr.model.transformer import Transformer
from tests.decode.test_recognizer import noise
from tests.decode.test_segments import in_blocks, loudness

SILENCE = np.zeros(SAMPLE_RATE, np.float32)
TURNS = np.concatenate([noise(2.0, 1), SILENCE, noise(1.5, 2), SILENCE, noise(1.2, 3)])


@pytest.fixture
def recognizer(tiny_model, noise_is_heard, monkeypatch) -> Recognizer:
    """A recogniser that takes anything loud for speech."""
    monkeypatch.setattr(listening, "SpeechDetector", lambda: loudness)
    with torch.no_grad():
        tiny_model.transformer.ctc.weight.mul_(20)
    return Recognizer(tiny_model, DecodeOptions(beam_size=3), precision="float32", piece_seconds=4, word_times=True)


def test_a_pause_ends_a_piece_which_is_heard_as_it_would_be_alone(recognizer):
    segments = [segment for heard in listen(recognizer, in_blocks(TURNS, 1000)) for segment in heard.segments]
    assert [segment.start for segment in segments] == pytest.approx([0.0, 2.8, 5.3], abs=0.05)
    assert [segment.end for segment in segments] == pytest.approx([2.2, 4.7, 6.7], abs=0.05)
    for segment in segments:
        piece = Piece(segment.start, TURNS[round(segment.start * SAMPLE_RATE) : round(segment.end * SAMPLE_RATE)])
        [alone] = recognizer.segments(piece, recognizer.recognize([piece.samples])[0])
        assert segment.text == alone.text and segment.words[-1].end == alone.words[-1].end
        assert segment.start <= segment.words[0].start < segment.end  # in the recording, not in the piece
        assert segment.score == pytest.approx(alone.score, abs=1e-4)


def test_drafts_are_of_the_piece_so_far(recognizer):
    """A draft is made every half second, until a pause has lasted for as long."""
    drafter, sizes = drafter_of(recognizer, "ctc"), []

    def decode(own: Recognizer, inputs: list[np.ndarray]):
        sizes.append((own.options.strategy, *(len(x) / SAMPLE_RATE for x in inputs)))
        return own.recognize(inputs)

    drafts = list(listen(recognizer, in_blocks(TURNS[: 4 * SAMPLE_RATE], 2000), drafter, decode=decode))
    assert sizes[:5] == [("ctc", 0.5), ("ctc", 1.0), ("ctc", 1.5), ("ctc", 2.0), ("ctc", 2.5)]
    assert [strategy for strategy, _ in sizes].count("beam") == 2 and sizes[5] == ("beam", pytest.approx(2.2, abs=0.05))
    assert {heard.start and round(heard.start, 1) for heard in drafts} == {None, 0.0, 2.8}
    whole = drafter.transcribe(TURNS[: 2 * SAMPLE_RATE]).text
    assert any(whole.endswith(heard.tentative) and heard.tentative for heard in drafts if heard.start == 0.0)


def test_a_slow_draft_leaves_time_to_others(recognizer, monkeypatch):
    drafter, now, drafts = drafter_of(recognizer, "ctc"), [0.0], []
    monkeypatch.setattr(listening, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def decode(own: Recognizer, inputs: list[np.ndarray]):
        if own is drafter:
            drafts.append(len(inputs[0]) / SAMPLE_RATE)
            now[0] += drafts[-1] / 2
        return own.recognize(inputs)

    list(listen(recognizer, in_blocks(noise(3.9), 2000), drafter, decode=decode, rest=2.0))
    assert drafts == pytest.approx([0.5, 1.0, 2.0])  # the next would come at 4 s


def test_without_a_drafter_only_pieces_are_decoded(recognizer):
    heard = list(listen(recognizer, in_blocks(TURNS, 1000)))
    assert len(heard) == 3 and all(len(each.segments) == 1 and each.start is None for each in heard)


def test_speech_without_a_pause_is_cut_all_the_same(recognizer):
    segments = [segment for heard in listen(recognizer, in_blocks(noise(9.5), 3000)) for segment in heard.segments]
    lengths = [segment.end - segment.start for segment in segments]
    assert len(segments) >= 3 and max(lengths) <= 4 and sum(lengths) == pytest.approx(9.5)


@pytest.mark.parametrize("sound", [np.zeros(0, np.float32), np.zeros(3 * SAMPLE_RATE, np.float32)])
def test_where_nothing_is_said_nothing_is_heard(recognizer, sound):
    assert list(listen(recognizer, in_blocks(sound, 1000))) == []


def test_an_hour_at_once_is_decoded_in_turns(recognizer):
    """As when the audio comes from a file, and not from a microphone."""
    most = []

    def decode(own: Recognizer, inputs: list[np.ndarray]):
        most.append(sum(map(len, inputs)) / SAMPLE_RATE)
        return own.recognize(inputs)

    segments = [s for heard in listen(recognizer, [np.tile(TURNS, 10)], decode=decode) for s in heard.segments]
    assert len(segments) == 21  # the third turn of each copy runs into the first of the next
    assert max(most) <= 8.0


def test_words_are_settled_as_far_as_two_drafts_agree():
    draft = _Draft()
    told = []
    for words in ("he", "here is", "here is a", "her is a cat", "her is a cat", "her is a cat", "here"):
        is_news = draft.is_news(words.split())
        told.append((is_news, draft.settled, draft.tentative))
    assert told == [
        (True, "", "he"),
        (True, "", "here is"),
        (True, "here is", "a"),
        (True, "here is a", "cat"),  # what was settled stays
        (True, "here is a cat", ""),
        (False, "here is a cat", ""),
        (False, "here is a cat", ""),
    ]


def test_a_model_without_ctc_drafts_by_attention(tiny_model, tiny_config, recognizer):
    config = ModelConfig(**{**vars(tiny_config), "ctc": False})
    model = SpeechModel(tiny_model.front_end.config, Transformer(config), tiny_model.tokenizer)
    own = Recognizer(model, DecodeOptions(beam_size=2, ctc_weight=0.0))
    assert (drafter_of(own).options.strategy, drafter_of(recognizer).options.strategy) == ("greedy", "rescore")
    heard = list(listen(own, in_blocks(TURNS, 2000), drafter_of(own)))
    assert any(each.tentative for each in heard) and len([each for each in heard if each.segments]) == 3


def test_where_ctc_has_no_part_drafts_are_by_attention(recognizer):
    assert drafter_of(recognizer.with_options(ctc_weight=0.0)).options.strategy == "greedy"


def test_a_draft_is_made_without_what_takes_time(recognizer):
    drawn = recognizer.with_options(strategy="greedy", beam_size=1, temperature=0.5)
    assert drafter_of(drawn).options.temperature == 0.0
    again = drafter_of(recognizer.with_options(nbest=3, fallback=(0.5,))).options
    assert (again.nbest, again.fallback) == (1, ())
    helped = drafter_of(recognizer.with_options(lm_weight=0.5, ilm_weight=0.1, phrases=("ab",)), "ctc")
    assert (helped.options.lm_weight, helped.options.ilm_weight, helped.options.phrases) == (0.0, 0.0, ())
    assert recognizer.word_times and not helped.word_times


def test_a_piece_begins_without_the_words_of_the_last(recognizer):
    def segments(piece: Piece, _) -> list[SimpleNamespace]:
        return [SimpleNamespace(words=[SimpleNamespace(text=f"{piece.start:.1f}")])]

    def decode(own, inputs: list[np.ndarray]):
        return [None] if own is drafter else own.recognize(inputs)

    drafter = SimpleNamespace(segments=segments)
    drafts = [each for each in listen(recognizer, in_blocks(TURNS, 1000), drafter, decode=decode) if each.settled]
    assert len(drafts) == 3
    assert all(each.settled == f"{each.start:.1f}" for each in drafts)


def test_nothing_is_drafted_while_nobody_speaks(recognizer):
    def decode(own: Recognizer, inputs: list[np.ndarray]):
        pytest.fail("nothing was said")

    assert list(listen(recognizer, in_blocks(np.tile(SILENCE, 3), 1000), drafter_of(recognizer), decode=decode)) == []


def test_a_piece_without_a_word_has_no_segments(recognizer):
    def decode(own: Recognizer, inputs: list[np.ndarray]):
        return [[Hypothesis([], 0.0)] for _ in inputs]

    assert [heard.segments for heard in listen(recognizer, in_blocks(TURNS, 1000), decode=decode)] == [[], [], []]


def test_several_share_a_recogniser(recognizer):
    shared, drafter = SharedRecognizer(recognizer), drafter_of(recognizer)
    alone = list(listen(recognizer, in_blocks(TURNS, 1000), drafter))
    found: list[list] = [[], []]
    threads = [
        threading.Thread(
            target=lambda i=i: found[i].extend(
                listen(recognizer, in_blocks(TURNS, 1000), drafter, decode=shared.recognize)
            )
        )
        for i in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for heard in found:
        assert [(each.start, each.settled, each.tentative) for each in heard] == [
            (each.start, each.settled, each.tentative) for each in alone
        ]
        assert [[s.text for s in each.segments] for each in heard] == [
            [s.text for s in each.segments] for each in alone
        ]


def test_what_has_come_in_meanwhile_is_one_block():
    inbox: queue.Queue[bytes | None] = queue.Queue()
    blocks = drained(inbox)
    samples = np.array([0, 16384, -32768, 8192], "<i2").tobytes()
    inbox.put(samples[:3])  # a sample and a half
    np.testing.assert_array_equal(next(blocks), np.array([0.0], np.float32))
    inbox.put(samples[3:5])
    inbox.put(samples[5:])
    inbox.put(None)
    np.testing.assert_array_equal(next(blocks), np.array([0.5, -1.0, 0.25], np.float32))
    assert list(blocks) == []


def test_of_much_that_has_come_in_so_much_is_taken_at_a_time(monkeypatch):
    monkeypatch.setattr(listening, "MOST_BYTES", 10)
    inbox: queue.Queue[bytes | None] = queue.Queue()
    for block in (b"\0" * 6, b"\0" * 7, b"\0" * 30, b"\0", None):
        inbox.put(block)
    assert [len(block) for block in drained(inbox)] == [6, 15, 1]


def test_blocks_are_heard_in_whatever_form_a_recording_may_have(recognizer):
    whole = (TURNS * 32767).astype(np.int16)
    expected = [s for heard in listen(recognizer, in_blocks(whole / 32768, 1000)) for s in heard.segments]
    for blocks in (in_blocks(whole, 1000), map(torch.from_numpy, in_blocks(whole, 1000))):
        assert [s for heard in listen(recognizer, blocks) for s in heard.segments] == expected


def test_a_sample_that_is_no_number_ends_it_and_does_not_deafen_it(recognizer):
    broken = np.append(TURNS[: 4 * SAMPLE_RATE], np.float32(np.nan))
    heard = listen(recognizer, in_blocks(broken, 1000))
    assert next(heard).segments
    with pytest.raises(AudioError, match="samples must be finite"):
        list(heard)


def test_what_cannot_be_is_said(recognizer):
    for pause in (0.1, float("inf")):
        with pytest.raises(ValueError, match=rf"pause must be at least 0.2 s and finite, not {pause}"):
            list(listen(recognizer, [], pause=pause))
    for every in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=rf"every must be positive and finite, not {every}"):
            list(listen(recognizer, [], every=every))
    recognizer.takes = "matrix"
    with pytest.raises(ValueError, match="this model takes matrix, not sound"):
        list(listen(recognizer, []))


def test_who_waits_for_sound_looks_up_every_second_so_that_no_ctrl_c_is_missed():
    inbox = MagicMock(empty=lambda: True)
    inbox.get.side_effect = [queue.Empty, b"\1\0", None]
    assert [len(block) for block in drained(inbox)] == [1, 0]
    assert all(call.kwargs == {"timeout": 1.0} for call in inbox.get.call_args_list)
