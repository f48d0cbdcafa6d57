"""What this machine has, found out without starting CUDA: processes are forked from here."""

from __future__ import annotations

from pathlib import Path

HAS_GPU = Path("/dev/nvidiactl").exists()
