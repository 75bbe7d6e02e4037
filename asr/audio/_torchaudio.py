"""The one place that imports torchaudio.

torchaudio's published wheel links CUDA, so with a CPU-only torch its compiled extension cannot be loaded and `import
torchaudio` raises OSError. Nothing used here needs the extension: if it fails, torchaudio is imported without it.
"""

from __future__ import annotations

import sys
import types


def _refuse(function):
    def fail(*args, **kwargs):
        raise RuntimeError("forced_align needs torchaudio's compiled extension, which could not be loaded here")

    return fail


try:
    import torchaudio
except OSError:
    for name in [name for name in sys.modules if name.split(".")[0] == "torchaudio"]:
        del sys.modules[name]
    stand_in = types.ModuleType("torchaudio._extension")
    stand_in._IS_TORCHAUDIO_EXT_AVAILABLE = False
    stand_in.fail_if_no_align = _refuse
    sys.modules["torchaudio._extension"] = stand_in
    import torchaudio

functional = torchaudio.functional
kaldi = torchaudio.compliance.kaldi
transforms = torchaudio.transforms
