"""A release has the version of its tag."""

from __future__ import annotations

import os
import shutil
import subprocess
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"


def test_a_release_has_the_version_of_its_tag(tmp_path, monkeypatch):
    """Only the tag of the version that is written in the package passes, and builds take it from there, without git."""
    build = pytest.importorskip("scikit_build_core.build")  # a build requirement
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    init = tmp_path / "reshard" / "__init__.py"
    init.parent.mkdir()
    text = (ROOT / "reshard" / "__init__.py").read_text()
    before, _, after = text.partition('__version__ = "')
    init.write_text(f'{before}__version__ = "1.2.3"{after.partition(chr(34))[2]}')
    check = yaml.safe_load(WORKFLOW.read_text())["jobs"]["check-version"]["steps"][-1]["run"]
    monkeypatch.chdir(tmp_path)
    for tag, passes in (("v1.2.3", True), ("v1.2.4", False), ("v1.2.3.post1", False)):
        run = subprocess.run(["bash", "-ec", check], env=os.environ | {"GITHUB_REF_NAME": tag}, check=False)
        assert (run.returncode == 0) is passes, tag
    assert build.build_sdist(str(tmp_path / "sdist")) == "reshard-1.2.3.tar.gz"
    metadata = tmp_path / build.prepare_metadata_for_build_wheel(str(tmp_path)) / "METADATA"
    assert Parser().parsestr(metadata.read_text())["Version"] == "1.2.3"
