"""Whether this machine has a GPU, found without initializing CUDA, because tests fork processes."""

from __future__ import annotations

from pathlib import Path

HAS_GPU = Path("/dev/nvidiactl").exists()
