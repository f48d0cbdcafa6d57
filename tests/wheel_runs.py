"""Install a wheel into an environment of its own, without a compiler, and run the example of the README there.

``python tests/wheel_runs.py build/wheel``
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """0 if the example prints what the README says."""
    (wheel,) = Path(sys.argv[1]).glob("reshard-*.whl")
    page = (ROOT / "README.md").read_text()
    script = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[0]
    expected = re.findall(r"^rank \d has \[.*?\]$", page, flags=re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = f"{folder}/bin/python"
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, "torch==2.13.0", str(wheel)], check=True)
        Path(folder, "rows.py").write_text(script)
        environment = {"PATH": f"{folder}/bin", "HOME": folder, "LANG": os.environ.get("LANG", "C.UTF-8")}
        run = subprocess.run(
            [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "rows.py"],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    found = sorted(re.findall(r"rank \d has \[.*?\]", run.stdout))
    print(run.stdout, end="")
    if run.returncode or found != expected:
        print(run.stderr, file=sys.stderr)
        return 1
    print(f"{wheel.name} runs without a compiler")
    return 0


if __name__ == "__main__":
    sys.exit(main())
