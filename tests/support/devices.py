"""Devices of this machine, detected without initializing CUDA, because tests fork processes."""

from __future__ import annotations

from pathlib import Path

HAS_GPU = Path("/dev/nvidiactl").exists()
