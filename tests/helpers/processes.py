"""Code in an interpreter of its own, and what it needs of the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile on a CPU needs g++"
)


def python(code: str, *args: str, **environment: str) -> str:
    """Standard output of ``code`` in a fresh interpreter."""
    result = subprocess.run(
        [sys.executable, "-c", code, *args],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout
