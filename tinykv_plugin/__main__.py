"""``python -m tinykv_plugin``: the same as the command ``tinykv``."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
