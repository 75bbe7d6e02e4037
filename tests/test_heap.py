import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's")

GROWTH = """
import ctypes, sys, torch
from asr.heap import keep_kernels
class Heap(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]
mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Heap
keep_kernels(int(sys.argv[1]))
weights = torch.randn(16, 16, 3, 3)
with torch.inference_mode():
    torch.conv2d(torch.randn(1, 16, 9, 9), weights)
    before = mallinfo().uordblks
    for width in range(10, 160):
        torch.conv2d(torch.randn(1, 16, width, width + 1), weights)
print(mallinfo().uordblks - before)
"""


def growth(programs: Path, kernels: int, **environment: str) -> int:
    """The bytes by which the heap grows during convolutions of 150 shapes."""
    free = {name: value for name, value in os.environ.items() if "CACHE_CAPACITY" not in name}
    command = [programs / "python", "-c", GROWTH, str(kernels)]
    done = subprocess.run(command, env=free | environment, capture_output=True, text=True)
    if "mallinfo2" in done.stderr:
        pytest.skip("this C library does not tell what is in use")
    return int(done.stdout)


def test_fewer_kernels_take_less_memory(programs):
    assert growth(programs, 8) < growth(programs, 1024) / 2


def test_what_the_user_set_stays(programs):
    few = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8", "LRU_CACHE_CAPACITY": "8"}
    assert growth(programs, 1024, **few) < growth(programs, 1024) / 2


IMPORTS = """
import gc
from asr.heap import importing
before = gc.get_freeze_count()
for imported in (False, True):
    with importing():
        assert not gc.isenabled()
        if imported:
            import zipapp
    assert gc.isenabled() and (gc.get_freeze_count() > before) == imported
"""


def test_what_is_imported_is_not_looked_through_for_garbage(programs):
    subprocess.run([programs / "python", "-c", IMPORTS], check=True)
