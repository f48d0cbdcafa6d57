"""Whether the package that tests import is that of their checkout."""

from __future__ import annotations

from pathlib import Path


def find_wrong_package(origin, root):
    """Why the imported package is not that of a checkout, as text; empty if it is.

    An editable install imports the files of its checkout. An installed copy must have the same files as the checkout.

    Args:
        origin: the path of the imported ``reshard/__init__.py``.
        root: the path of the checkout.
    """
    package, root = Path(origin).resolve().parent, Path(root).resolve()
    if package == root / "reshard":
        return ""
    cure = f"run `make install` in {root}, and test with {root}/.venv/bin/python -m pytest"
    if (package.parent / "pyproject.toml").exists():
        return f"these tests are of {root}, but this Python imports reshard from the checkout {package.parent}; {cure}"
    for folder, copy in (("reshard", package), ("scheduler", package / "scheduler")):
        for path in sorted((root / folder).rglob("*.py")):
            place = copy / path.relative_to(root / folder)
            if not place.exists() or place.read_bytes() != path.read_bytes():
                return f"this Python imports {package}, a copy in which {path.relative_to(root)} differs; {cure}"
    return ""
