"""What the pages show is so: their scripts run, print what stands there, and doctests hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import snippets

DOCS = Path(__file__).parents[1]
PAGES = sorted(
    page for page in DOCS.rglob("*.md") if not page.relative_to(DOCS).parts[0].startswith("_")
)
#: Pages that are run as they are read, whose kind of run no other one has: hanging, TensorFlow.
ALWAYS = {"find-a-hang.md", "tensorflow.md"}
#: The same, in copies of a process that has PyTorch: in one process and two, resumed.
COPIED = {"five-minutes.md", "checkpoints.md"}
PRELOAD = ("smdistributed.modelparallel.torch", "torch._dynamo", "torch.profiler")


def named(pages: list[Path]) -> list[object]:
    return [pytest.param(page, id=str(page.relative_to(DOCS))) for page in pages]


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            id=str(page.relative_to(DOCS)),
            marks=() if page.name in ALWAYS else pytest.mark.slow,
        )
        for page in PAGES
        if snippets.has_runs(page)
    ],
)
def test_commands_print_what_is_shown(page: Path, tmp_path: Path) -> None:
    snippets.run(page, tmp_path)


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "page", named([page for page in PAGES if page.name in COPIED and snippets.has_runs(page)])
)
def test_programs_print_what_is_shown(page: Path, tmp_path: Path) -> None:
    snippets.run(page, tmp_path, PRELOAD)


@pytest.mark.parametrize(
    "page",
    named([page for page in PAGES if any(b.language == "pycon" for b in snippets.blocks_of(page))]),
)
def test_doctests(page: Path) -> None:
    snippets.run_doctests(page)


@pytest.mark.parametrize("page", named(PAGES))
def test_python_is_run_or_says_why_not(page: Path) -> None:
    for block in snippets.blocks_of(page):
        if block.language == "python":
            where = f"{page}:{block.line}"
            compile(block.text, where, "exec", dont_inherit=True)
            assert snippets.has_runs(page) or block.kind == "not run", where
            assert block.kind != "not run" or block.words, f"{where}: say why it is not run"


def page_of(tmp_path: Path, text: str) -> Path:
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    return page


WHOLE = """
```python
print("loss 0.5000")
```
<!-- run -->
```console
$ python train.py
```
<!-- output -->
```text
loss 0.5001
```
```pycon
>>> 1 + 1
2
```
"""


def test_a_page_that_is_right_passes(tmp_path: Path) -> None:
    page = page_of(tmp_path, WHOLE)
    snippets.run(page, tmp_path)
    snippets.run_doctests(page)


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("print(", "prnt(", "ended with 1, not 0"),
        ("loss 0.5001", "loss 0.6", "was not printed"),
        ("loss 0.5001", "Loss 0.5000", "was not printed"),
        ("loss 0.5001", "loss ... 0.6", "was not printed"),
        ("<!-- run -->", "<!-- run, exit 3 -->", "ended with 0, not 3"),
        ("<!-- output -->", "<!-- output -->\nwords", "no fenced block"),
    ],
)
def test_a_page_that_is_wrong_fails(tmp_path: Path, old: str, new: str, match: str) -> None:
    page = page_of(tmp_path, WHOLE.replace(old, new))
    with pytest.raises(snippets.SnippetError, match=match):
        snippets.run(page, tmp_path)


def test_a_wrong_doctest_fails(tmp_path: Path) -> None:
    page = page_of(tmp_path, WHOLE.replace(">>> 1 + 1", ">>> 1 + 2"))
    with pytest.raises(snippets.SnippetError, match="Expected"):
        snippets.run_doctests(page)


#: What a page shows wrong somewhere: links that are empty outside of this site, and a table in two.
_WRONG = {
    "a link has no text": re.compile(r"\[\]\("),
    "a blank line cuts a table": re.compile(r"^\|.*\n\n\|(?! ?-+)(?!.*\n\| ?-)", re.M),
}


@pytest.mark.parametrize("page", named(PAGES))
def test_pages_read_well_elsewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for problem, pattern in _WRONG.items():
        assert not (found := pattern.search(text)), f"{page}: {problem}: {found[0]!r}"
