"""The built site in a browser: answers are found by clicks, and pages look as they should.

``nox -s docs -- site`` builds it and runs this; elsewhere there is no browser, and nothing is run.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="nox -s docs -- site")

SITE = Path(__file__).parents[1] / "_build" / "html"
PAGES = sorted(
    page for page in SITE.rglob("*.html") if page.relative_to(SITE).parts[0][0] not in "_"
)
#: Lists that Sphinx makes of all names, and its search.
MADE = {"genindex.html", "py-modindex.html", "search.html"}
DESK, TELEPHONE = {"width": 1440, "height": 900}, {"width": 400, "height": 800}

#: What a user asks, what one clicks from the first page, and what the page then says.
QUESTIONS = [
    ("How do I fine-tune my model?", ["Fine-tune a Hugging Face model"], "from_pretrained"),
    ("What changes in my training loop?", ["Port a script"], "model.backward(loss)"),
    ("Which parallelism do I need?", ["Which parallelism"], "In this order"),
    ("What is ZeRO-3 here?", ["Coming from another library"], "zero_optimization.stage: 3"),
    ("And gradient accumulation?", ["Coming from another library"], "Gradient accumulation is"),
    ("Can I train adapters?", ["LoRA: train adapters with peft"], "peft.get_peft_model"),
    ("CUDA out of memory!", ["Errors by message", "Save memory"], "active_microbatches"),
    ("How do I train in bf16?", ["Train in half precision"], "bf16"),
    ("Does Transformers open what I save?", ["Evaluate, generate and export"], "save_pretrained"),
    ("How do I go on after a crash?", ["Save and resume checkpoints"], "resume_from_checkpoint"),
    ("How do I start it on our cluster?", ["Run under Slurm"], "#SBATCH"),
    (
        "Does my architecture work?",
        ["203 architectures of Transformers"],
        "All variants that apply",
    ),
    ("Does Keras's fit work?", ["A Keras model over processes"], "model.fit("),
    (
        "And my own loop with a tape?",
        ["A Keras model over processes", "Train a Keras model in a loop of your own"],
        "tf.GradientTape",
    ),
    (
        "What is refused of Keras?",
        ["Known limits", "Of TensorFlow models"],
        "save_before_preemption",
    ),
]

_FOUND = """
() => {
  const inside = [...document.querySelectorAll('article p, article li')];
  const words = inside.map(each => {
    const copy = each.cloneNode(true);
    copy.querySelectorAll('code, pre, .math').forEach(code => code.remove());
    return copy.textContent.trim();
  });
  const scrolls = each => each.tagName !== 'ARTICLE' && (
    ['auto', 'scroll'].includes(getComputedStyle(each).overflowX) || scrolls(each.parentElement));
  const wide = [...document.querySelectorAll('article *')].filter(
    each => each.getBoundingClientRect().right > window.innerWidth + 1 && !scrolls(each));
  const links = [...document.querySelectorAll('article a[href]')];
  return {
    pipes: words.filter(text => /^\\||\\|$|\\| ?-{3,}/.test(text)),
    empty: links.filter(link => !link.textContent.trim() && !link.querySelector('img, svg'))
      .map(link => link.href),
    wide: wide.map(each => each.outerHTML.slice(0, 80)),
    width: document.documentElement.scrollWidth,
  };
}
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    assert PAGES, "there is no site yet: nox -s docs -- site builds it"
    with playwright.sync_playwright() as started:
        own = shutil.which("chromium")
        found = started.chromium.launch(executable_path=own, args=["--no-sandbox"])
        yield found
        found.close()


def click(page: Any, words: str) -> None:
    """Clicks where the words are seen first, as a reader does: on a card, a menu, a link."""
    seen = page.get_by_text(words, exact=True).locator("visible=true").first
    seen.scroll_into_view_if_needed()
    line = seen.evaluate("each => each.getClientRects()[0].toJSON()")  # it may go over two
    before = page.url
    page.mouse.click(line["x"] + line["width"] / 2, line["y"] + line["height"] / 2)
    page.wait_for_url(lambda url: url != before, timeout=5000, wait_until="commit")
    page.wait_for_load_state()


@pytest.mark.parametrize(
    ("words", "answer"),
    [pytest.param(words, answer, id=question) for question, words, answer in QUESTIONS],
)
def test_an_answer_is_a_few_clicks_from_the_first_page(
    browser: Any, words: list[str], answer: str
) -> None:
    page = browser.new_page(viewport=DESK)
    page.goto(f"file://{SITE}/index.html")
    for each in words:
        click(page, each)
    text = re.sub(r"\s+", " ", page.locator("article").text_content())
    assert answer in text
    page.close()


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=str(path.relative_to(SITE))) for path in PAGES if path.name not in MADE],
)
def test_a_page_is_whole_on_a_telephone(browser: Any, path: Path) -> None:
    page = browser.new_page(viewport=TELEPHONE)
    page.goto(f"file://{path}")
    found = page.evaluate(_FOUND)
    page.close()
    assert found == {"pipes": [], "empty": [], "wide": [], "width": TELEPHONE["width"]}
