"""Builds and installs tinykv-native where a C++ compiler is, and says so where not: then gather serves.

    python tests/packaging/install_native.py

The wheel is kept in .tox/native-wheel, so that several environments build it once.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "native"


def compiler() -> str | None:
    """A C++ compiler on the path, or the one in CXX."""
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def fingerprint() -> str:
    """Of the sources and of the Python that the wheel is for."""
    digest = hashlib.sha256(sys.version.encode())
    tracked = [path for path in SOURCE.rglob("*") if path.is_file() and "build" not in path.relative_to(SOURCE).parts]
    for path in sorted(tracked):
        if path.suffix != ".pyc":
            digest.update(str(path.relative_to(SOURCE)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def main() -> int:
    found = compiler()
    if found is None:
        print("tinykv-native is not built: there is no C++ compiler; gather serves attention")
        return 0
    folder = ROOT / ".tox" / "native-wheel" / fingerprint()
    if not list(folder.glob("*.whl")):
        print(f"building tinykv-native with {found}", flush=True)
        build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(SOURCE)]
        done = subprocess.run(build, check=False)
        if done.returncode:
            print("tinykv-native doesn't build here; gather serves attention")
            return 0
    (wheel,) = folder.glob("*.whl")
    return subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", str(wheel)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
