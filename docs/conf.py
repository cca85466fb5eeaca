"""Sphinx configuration."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from settings import settings_table

import tinykv_plugin

project = "tinykv-plugin"
author = "The tinykv-plugin authors"
project_copyright = f"2025, {author}"
version = release = tinykv_plugin.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = f"tinykv-plugin {release}"

myst_enable_extensions = ["colon_fence", "deflist", "substitution"]
myst_heading_anchors = 3
myst_substitutions = {"settings": settings_table()}

# The build needs neither mlx nor a model.
autodoc_mock_imports = ["mlx", "mlx_lm", "numpy"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
