"""Freed memory is kept: tensors that come and go need no fresh pages."""

import platform
import subprocess
import sys

import pytest

PAGES_PER_TENSOR = """
import resource, torch
from maestro_lod.cli.memory import keep_freed_memory
assert keep_freed_memory()
def come_and_go():
    for _ in range(20):
        [torch.ones(1 << 20) for _ in range(10)]  # 4 MB each, like a step's activations
come_and_go()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
come_and_go()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 200)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_tensors_that_come_and_go_need_no_fresh_pages() -> None:
    command = [sys.executable, "-c", PAGES_PER_TENSOR]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1
