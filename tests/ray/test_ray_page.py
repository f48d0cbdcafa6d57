"""The code of the Ray page, as a user runs it on one machine."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="ray is not installed: pip install 'reshard[ray]'")


@pytest.mark.nightly
def test_code_of_the_ray_page_runs(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "ray.md"
    blocks = re.findall(r"```python ray\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert len(blocks) == 2
    (tmp_path / "page.py").write_text("\n".join(blocks))  # in one process, because Ray takes seconds to start
    subprocess.run([sys.executable, "page.py"], cwd=tmp_path, check=True, capture_output=True, timeout=240)
