"""Installs mlx-lm on Python 3.10, where pip has to be told that it runs; elsewhere it is there already.

python tests/packaging/install_mlx_lm.py
"""

from __future__ import annotations

import shlex
import subprocess
import sys

from tinykv_plugin.mlx_lm_installation import how_to_install

if __name__ == "__main__" and sys.version_info < (3, 11):
    _, *command = shlex.split(how_to_install())
    sys.exit(subprocess.run([sys.executable, *command, "--quiet"], check=False).returncode)
