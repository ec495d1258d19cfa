"""Configuration of the documentation."""

from __future__ import annotations

from importlib.metadata import version as version_of
from pathlib import Path

from smdistributed.modelparallel.common.config import docs as config_docs

project = "smdistributed.modelparallel"
author = "the smdistributed.modelparallel developers"
release = version = version_of("smp-common")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "_generated"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # else a field with a comment of its own appears twice

html_theme = "furo"
html_title = "smdistributed.modelparallel"
html_static_path = ["_static"]
html_css_files = ["wide_tables.css"]
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True

# The tables of the configuration come from its declarations, at each build.
_generated = Path(__file__).parent / "_generated"
_generated.mkdir(exist_ok=True)
(_generated / "configuration.md").write_text(config_docs.page(), encoding="utf-8")
