"""Configuration of the documentation."""

from __future__ import annotations

import gc
import os
import sys
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

# A build ends soon, and keeps nearly all that it makes until then.
gc.disable()

project = "smdistributed.modelparallel"
author = "the smdistributed.modelparallel developers"
release = version = version_of("smp-common")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "_generated", "tests"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # else a field with a comment of its own appears twice

# Each reference must lead somewhere, but for types of other projects, and those of ours that no
# script meets.
nitpicky = True
nitpick_ignore_regex = [
    (
        "py:.*",
        r"(torch|tf|tensorflow|keras|collections|contextlib|datetime|inspect|os|pathlib|types)\..*",
    ),
    (
        "py:.*",
        r"Origin|smdistributed\..*\.(runtime|transport|seal|store|parameters|placement|whereabouts)\..*",
    ),
    ("py:.*", r"smdistributed\.modelparallel\.common\.containers\..*"),
    ("py:.*", r"smdistributed\.modelparallel\.common\.search\.(?!plan\.).*"),
    (
        "py:.*",
        r"smdistributed\.modelparallel\.(torch|tensorflow)\.(model|optimizer)\..*",
    ),
    ("py:.*", r"smdistributed\.modelparallel\.torch\.tensor_parallel\..*"),
    (
        "py:.*",
        r"smdistributed\.modelparallel\.launch\.(experiments|job|serving|request|tracking)\..*",
    ),
    # What pydantic's fields say of bounds.
    ("py:.*", r"_PydanticGeneralMetadata|annotated_types\..*|types\.Annotated"),
]

html_theme = "furo"
html_show_copyright = False
html_title = "smdistributed.modelparallel"
html_static_path = ["_static"]
html_css_files = ["site.css"]
# Where the repository is, a build says that knows it, as CI does; pages say REPOSITORY.
repository = os.environ.get("SMP_REPOSITORY", "")
if repository:
    html_theme_options = {
        "source_repository": repository,
        "source_branch": "main",
        "source_directory": "docs/",
    }
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

# Tables and pictures of the code come from the code, at each build.
sys.path.insert(0, str(Path(__file__).parent))
import notebooks  # noqa: E402 - beside this file
import pages  # noqa: E402 - beside this file


def setup(app: Any) -> None:
    """Has pages name the repository where the build knows its address."""

    def name(app: Any, docname: str, source: list[str]) -> None:
        said = "`REPOSITORY` is the address of the repository. "
        if repository:
            source[0] = (
                source[0].replace(said, "").replace("REPOSITORY", repository)
            )

    app.connect("source-read", name)


_HERE = Path(__file__).parent
pages.write(_HERE / "_generated")
notebooks.write(_HERE / "tutorials/notebooks", _HERE / "_generated")
