"""Notebooks as pages: their cells, and below each what it printed.

What was printed is in the notebook. Where ``SMP_RUN_NOTEBOOKS`` is set, as ``nox -s docs`` sets it,
the notebook is run first, by smp-launch, and the page has what that gave: a cell that fails ends
the build. ``python docs/notebooks.py`` keeps in the notebooks what a run gives.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smdistributed.modelparallel.launch import notebooks

RUN_VARIABLE = "SMP_RUN_NOTEBOOKS"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_MAGIC = re.compile(r"%%writefile (?P<file>\S+)\n")


def write(folder: Path, generated: Path) -> None:
    """Writes a page for each notebook of a folder, where pages include it from."""
    for path in sorted(folder.glob("*.ipynb")):
        kept = json.loads(path.read_text(encoding="utf-8"))
        text = "\n".join(
            _blocks(run(path) if os.environ.get(RUN_VARIABLE) else kept)
        )
        (generated / f"notebook_{path.stem}.md").write_text(
            text, encoding="utf-8"
        )


def run(path: Path) -> dict[str, Any]:
    """Runs a notebook in an empty folder; returns it with what its cells gave."""
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place, path.name)
        shutil.copyfile(path, copy)
        notebooks.run(copy, copy, with_names=False)
        notebook = json.loads(copy.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        # Times of one run, and what only a kernel needs.
        cell["metadata"] = {}
        if cell["cell_type"] == "code":
            cell["execution_count"] = None
            cell["outputs"] = [
                each
                for each in cell["outputs"]
                if each["output_type"] == "stream"
            ]
    notebook["metadata"] = {"language_info": {"name": "python"}}
    found: dict[str, Any] = json.loads(
        json.dumps(notebook).replace(place, "/home/me")
    )
    return found


def _blocks(notebook: dict[str, Any]) -> Iterator[str]:
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield f"{source}\n"
            continue
        if found := _MAGIC.match(source):
            source = source[found.end() :]
            yield f"`{found['file']}`:\n"
        yield f"```python\n{source}\n```\n"
        printed = "".join("".join(each["text"]) for each in cell["outputs"])
        if printed.strip() and not found:
            yield f"```text\n{_COLOURS.sub('', printed).strip()}\n```\n"


if __name__ == "__main__":
    for each in sorted(
        Path(__file__).parent.glob("tutorials/notebooks/*.ipynb")
    ):
        whole = json.dumps(run(each), indent=1, ensure_ascii=False)
        each.write_text(f"{whole}\n", encoding="utf-8")
