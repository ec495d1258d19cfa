"""What the pages show is so: their scripts run, print what stands there, and doctests hold."""

from __future__ import annotations

import ast
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
COPIED = {"five-minutes.md", "checkpoints.md", "index.md"}
PRELOAD = (
    *("smdistributed.modelparallel.torch", "torch._dynamo", "torch.profiler"),
    "transformers.models.llama.modeling_llama",
)


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
        where = f"{page}:{block.line}"
        if block.language == "diff":
            for side in snippets.sides_of(block):
                compile(side, where, "exec", dont_inherit=True)
            assert block.kind == "file", f"{where}: name the file whose new side is run"
        elif block.language == "python":
            compile(block.text, where, "exec", dont_inherit=True)
            assert snippets.has_runs(page) or block.kind == "not run", where
            assert block.kind != "not run" or block.words, f"{where}: say why it is not run"


#: Messages on the page of errors that others raise: Python, PyTorch, the system.
_OTHERS = ("No module named", "Expected all tensors to be on the same device", "CUDA out of memory")


def test_messages_by_which_an_error_is_found_are_raised() -> None:
    page = (DOCS / "howto/troubleshoot.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| `([^`]+)`", page, re.M)
    assert len(shown) > 20
    files = (REPOSITORY / "packages").glob("*/src/**/*.py")
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    texts = "\n".join(
        node.value for node in nodes if isinstance(node, ast.Constant) and type(node.value) is str
    )
    parts = [part for text in shown if not text.startswith(_OTHERS) for part in text.split(" ... ")]
    assert not [part for part in parts if part not in texts]


#: Languages of code and commands; what a program prints is as wide as it is.
_CODE_LANGUAGES = {"python", "pycon", "diff", "console", "bash", "yaml"}


@pytest.mark.parametrize("page", named(PAGES))
def test_code_is_shown_without_scrolling(page: Path) -> None:
    for block in snippets.blocks_of(page):
        if block.language in _CODE_LANGUAGES:
            code = re.sub(r"^(>>> |\.\.\. )", "", block.text, flags=re.M)
            wide = [line for line in code.splitlines() if len(line) > 80]
            assert not wide, f"{page}:{block.line}"


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


DIFF = """
```python
import os
```
<!-- prepare
with open("mine.py", "w") as file:
    file.write("value = 1")
-->
<!-- file: train.py -->
```diff
 from mine import value

-print(value + absent)
+print(value + 1)
```
<!-- run -->
```console
$ python train.py
```
<!-- output -->
```text
2
```
"""


def test_of_a_diff_the_new_side_is_run(tmp_path: Path) -> None:
    snippets.run(page_of(tmp_path, DIFF), tmp_path)


def test_a_diff_that_is_wrong_fails(tmp_path: Path) -> None:
    page = page_of(tmp_path, DIFF.replace("+print(value + 1)", "+print(value + absent)"))
    with pytest.raises(snippets.SnippetError, match="ended with 1, not 0"):
        snippets.run(page, tmp_path)


@pytest.mark.parametrize("page", named(PAGES))
def test_who_is_to_run_an_example_is_told_of_its_environment(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if re.search(r"^\$ .*(python|smprun -n \d|torchrun) .*examples/", text, re.M):
        assert re.search(r"^\$ .*(activate|\[examples\])", text, re.M)


REPOSITORY = DOCS.parent
#: All that is read as Markdown: the pages, and what lies beside code.
READ = [
    *PAGES,
    *sorted(REPOSITORY.glob("*.md")),
    *sorted(REPOSITORY.glob("packages/*/*.md")),
]
#: A sentence whose subject the reader has to work out, in place of a name.
_RIDDLE = re.compile(r"(?:^|(?<=[.:;!] )|(?<=\n- ))(?:What|Who) [^?.]*(?:[.:;]|$)")
#: Pages for those who know the code.
_OF_CONTRIBUTORS = DOCS / "decisions"


@pytest.mark.parametrize("page", named([p for p in PAGES if _OF_CONTRIBUTORS not in p.parents]))
def test_sentences_have_subjects_that_a_reader_knows(page: Path) -> None:
    text = _CODE.sub("code", page.read_text(encoding="utf-8"))
    paragraphs = re.split(r"\n\s*\n|\n(?=[-|#] ?)", text)
    for paragraph in paragraphs:
        sentence = " ".join(paragraph.split()).lstrip("-| ")
        found = None if paragraph.startswith("#") else _RIDDLE.search(sentence)
        assert not found, f"{page}: name the subject: {found[0]!r}"


#: What reads badly somewhere, and what a page says that another one knows better.
_WRONG = {
    "a link has no text": re.compile(r"\[\]\("),
    "a blank line cuts a table": re.compile(r"^\|.*\n\n\|(?! ?-+)(?!.*\n\| ?-)", re.M),
    "a name in <> is taken for HTML": re.compile(r"<(?!br>)[a-z][a-z_]*>"),
    "what was measured is said in reference/performance.md": re.compile(
        r"not been measured|never been measured|not measured yet"
    ),
}
#: Code of a page: fenced, indented, or within a line.
_CODE = re.compile(r"^(`{3,}).*?^\1|^ {4,}\S.*?$|`[^`\n]+(?:\n[^`\n]+)?`", re.M | re.S)


def test_the_first_page_of_the_repository_shows_the_diff_that_is_run() -> None:
    (run,), (shown,) = (
        [block.text for block in snippets.blocks_of(page) if block.language == "diff"]
        for page in (DOCS / "index.md", REPOSITORY / "README.md")
    )
    assert shown == run


#: Where a link leads, unless to the web, or to what a service has beside the files.
_TARGET = re.compile(r"\]\((?!https?:|mailto:|#|\.\./\.\./actions/)([^)#\s]+)")


@pytest.mark.parametrize("page", [pytest.param(p, id=str(p.relative_to(REPOSITORY))) for p in READ])
def test_links_lead_to_files(page: Path) -> None:
    found = _TARGET.findall(_CODE.sub("code", page.read_text(encoding="utf-8")))
    missing = [target for target in found if not (page.parent / target).exists()]
    assert not missing, page


@pytest.mark.parametrize("page", [pytest.param(p, id=str(p.relative_to(REPOSITORY))) for p in READ])
def test_pages_read_well_everywhere(page: Path) -> None:
    text = _CODE.sub("code", page.read_text(encoding="utf-8"))
    for problem, pattern in _WRONG.items():
        assert not (found := pattern.search(text)), f"{page}: {problem}: {found[0]!r}"
