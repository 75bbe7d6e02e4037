import io
import signal
import threading

import numpy as np
import pytest
import soundfile

from asr.audio import reading
from asr.audio.interrupts import undisturbed
from asr.audio.reading import SAMPLE_RATE, read_audio, read_duration


class Interrupted(io.BytesIO):
    """A file that is interrupted by Ctrl-C during its `nth` read."""

    def __init__(self, content: bytes, nth: int):
        super().__init__(content)
        self.left = nth

    def readinto(self, buffer) -> int:
        self._count()
        return super().readinto(buffer)

    def read(self, *size) -> bytes:
        self._count()
        return super().read(*size)

    def _count(self) -> None:
        self.left -= 1
        if not self.left:
            signal.raise_signal(signal.SIGINT)


pytestmark = pytest.mark.usefixtures("ctrl_c")


@pytest.mark.parametrize("read", [read_audio, read_duration])
@pytest.mark.parametrize(("form", "subtype"), [("WAV", None), ("FLAC", None), ("OGG", "OPUS"), ("MP3", None)])
def test_ctrl_c_while_a_file_is_decoded_is_no_end_of_the_file(monkeypatch, read, form, subtype):
    sound = np.random.default_rng(0).normal(0, 0.1, 40 * SAMPLE_RATE)
    soundfile.write(file := io.BytesIO(), sound, SAMPLE_RATE, format=form, subtype=subtype)
    heard = 0
    for nth in (1, 2, 3, 5, 8, 13):
        interrupted = Interrupted(file.getvalue(), nth)
        monkeypatch.setattr(reading, "_open", lambda *_, file=interrupted: file)
        try:
            read("a")
        except KeyboardInterrupt:
            heard += 1
        else:
            assert interrupted.left > 0  # there were fewer than nth reads
    assert heard > 1


def test_what_is_done_undisturbed_is_done_first():
    done = []
    with pytest.raises(KeyboardInterrupt), undisturbed():
        signal.raise_signal(signal.SIGINT)
        done.append("all of it")
    assert done and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_and_handlers_are_left_alone():
    heard = []
    own = threading.Thread(target=lambda: heard.append(undisturbed().__enter__()))
    own.start()
    own.join()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with undisturbed():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [None]
