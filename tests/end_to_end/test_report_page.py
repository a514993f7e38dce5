"""The pages in a real browser: an empty console, nothing cut, links that lead somewhere, figures that can be read."""

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from simulations.history.compare import compare_folders
from simulations.history.compare_page import write_comparison
from simulations.history.statement import write_statement
from simulations.report.page import write_report
from tests.cases.chromium import Chromium, installed
from tests.cases.recorded_runs import record_run_in

pytestmark = pytest.mark.skipif(
    installed() is None and os.environ.get("CHROMIUM") != "require",
    reason="no Chromium is installed here: .ci/programs",
)

WIDE, NARROW = 1280, 400
SCREEN = 800


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def complete(place: Path) -> Path:
    """Of a classifier, with answers whose words are as long as a screen, and a confusion matrix."""
    folder = record_run_in(place)
    results = json.loads((folder / "results.json").read_text())
    said = {"prompt": "w" * 300, "reference": "a", "before": "b" * 200, "after": "It is."}
    results |= {"examples": [said], "test_confusion": [[3] * 7 for _ in range(7)]}
    (folder / "results.json").write_text(json.dumps(results))
    return write_report(folder)


def failed(place: Path) -> Path:
    folder = record_run_in(place, done=2, state="failed")
    status = json.loads((folder / "status.json").read_text())
    message = f"worker 2 did not answer: see {folder}/flower.log\n{'x' * 300}"
    (folder / "status.json").write_text(json.dumps({**status, "message": message}))
    return write_report(folder)


def not_private(place: Path) -> Path:
    return write_report(record_run_in(place, not_private="noise is off"))


def comparison(place: Path) -> Path:
    folders = []
    for number in range(2):
        (place / str(number)).mkdir()
        folders.append(record_run_in(place / str(number)))
    return write_comparison(compare_folders(folders), place / "compare.html")


def statement(place: Path) -> Path:
    return write_statement(record_run_in(place))[0][0]


PAGES = (complete, failed, not_private, comparison, statement)


@pytest.mark.parametrize("make", PAGES)
def test_a_page_is_sound_at_every_width_and_in_both_themes(
    make: Callable[[Path], Path], tmp_path: Path, browser: Chromium
) -> None:
    page = make(tmp_path)
    colors = set()
    for width, theme in ((WIDE, "light"), (WIDE, "dark"), (NARROW, "light"), (NARROW, "dark")):
        browser.show(page, width=width, height=SCREEN, theme=theme)
        browser.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        assert browser.problems() == []
        assert browser.evaluate("document.documentElement.scrollWidth") == width
        assert browser.evaluate(BROKEN_LINKS) == []
        assert browser.evaluate(CUT) == []
        assert browser.evaluate(UNREADABLE) == []
        colors.add((theme, browser.evaluate("getComputedStyle(document.body).backgroundColor")))
        shown = browser.evaluate("document.title + document.body.innerText")
        assert str(tmp_path) not in shown
        assert re.findall(r"/(?:home|root|tmp|var|work|Users)/\S*", shown) == []
    assert len(colors) == 2, "both themes look the same"


def test_the_figures_begin_on_the_second_screen_at_the_latest(tmp_path: Path, browser: Chromium) -> None:
    page = complete(tmp_path)
    for width in (WIDE, NARROW):
        browser.show(page, width=width, height=SCREEN)
        assert 0 < browser.evaluate("document.querySelector('figure').getBoundingClientRect().top") < 2 * SCREEN


def test_pointing_at_a_figure_tells_the_round(tmp_path: Path, browser: Chromium) -> None:
    browser.show(complete(tmp_path), width=WIDE, height=SCREEN)
    assert browser.evaluate(VISIBLE) == []
    browser.evaluate("document.querySelector('figure').scrollIntoView()")
    third = "document.querySelector('.readings').children[3].getBoundingClientRect()"
    x, y = browser.evaluate(f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({third})")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    assert browser.evaluate(VISIBLE) == ["round 3: 53.0\u00a0%"]


def test_the_checks_find_what_is_wrong(tmp_path: Path, browser: Chromium) -> None:
    page = tmp_path / "wrong.html"
    page.write_text(
        "<meta name=viewport content='width=device-width'><p style='width: 900px'>wide</p><a href='#nowhere'>on</a>"
        "<a href='missing.txt'>file</a><p style='color: #eee; background: #fff'>pale</p>"
        "<p style='width: 20px; overflow: hidden'>incomprehensibilities</p><script>console.error('oh')</script>"
        "<script>nothing()</script><img src='missing.png'>"
    )
    browser.show(page, width=NARROW)
    said = " ".join(browser.problems())
    assert "oh" in said
    assert "nothing is not defined" in said
    assert "missing.png" in said
    assert browser.evaluate("document.documentElement.scrollWidth") > NARROW
    assert browser.evaluate(BROKEN_LINKS) == ["#nowhere", "missing.txt"]
    assert browser.evaluate(CUT) == ["incomprehensibilities"]
    assert browser.evaluate(UNREADABLE) == ["pale"]
    browser.evaluate("document.querySelector('a').textContent")


BROKEN_LINKS = """
Array.from(document.querySelectorAll('a')).map(link => link.getAttribute('href'))
    .filter(target => !(target.startsWith('#') && document.getElementById(target.slice(1))))
"""
"""What leads nowhere within the page; a page that is sent on alone has nothing else to lead to."""

CUT = """
Array.from(document.querySelectorAll('body *:not(svg *)'))
    .filter(each => getComputedStyle(each).overflowX == 'hidden' && each.scrollWidth > each.clientWidth + 1)
    .map(each => each.textContent)
"""

VISIBLE = """
Array.from(document.querySelectorAll('.reading > g')).filter(each => getComputedStyle(each).visibility == 'visible')
    .map(each => each.textContent)
"""

UNREADABLE = """
(() => {
    const parts = color => color.match(/[\\d.]+/g).map(Number);
    const light = color => {
        const [r, g, b] = parts(color).slice(0, 3).map(c => c / 255)
            .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = each => {
        for (; each; each = each.parentElement) {
            const color = getComputedStyle(each).backgroundColor;
            if (color.startsWith('rgb(')) return color;
        }
        return matchMedia('(prefers-color-scheme: dark)').matches ? 'rgb(0, 0, 0)' : 'rgb(255, 255, 255)';
    };
    return Array.from(document.querySelectorAll('body *:not(script):not(style)'))
        .filter(each => Array.from(each.childNodes).some(node => node.nodeType == 3 && node.textContent.trim()))
        .filter(each => getComputedStyle(each).visibility == 'visible')
        .filter(each => {
            const style = getComputedStyle(each), ink = each.closest('svg') ? style.fill : style.color;
            if (!ink.startsWith('rgb')) return false;
            const [one, other] = [light(ink), light(behind(each))];
            return (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05) < 4.5;
        })
        .map(each => each.textContent);
})()
"""
"""Text with less contrast than 4.5 to 1 (WCAG 2.2, AA), of the page and of its figures."""
