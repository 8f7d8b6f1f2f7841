"""The page in a real browser: nothing is requested, nothing complains, curves can be read by keyboard."""

import shutil

import pytest
from playwright.sync_api import sync_playwright
from report_run_folders import add_rollouts, metrics, run_folder

from trainfer.check.report.training import write_training_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine (apt-get install chromium)"
)


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
                  "--disable-background-networking", "--disable-component-update"],
        )  # fmt: skip
        yield browser
        browser.close()


@pytest.fixture
def page_file(tmp_path):
    folder = run_folder(tmp_path, [(step, metrics(step)) for step in range(1, 101)])
    for step in (1, 100):
        add_rollouts(folder, step, ["</script><script>window.hacked = 1</script>", "4"])
    return write_training_report(folder)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_quiet_and_loads_nothing(browser, page_file, scheme):
    page = browser.new_page(color_scheme=scheme, viewport={"width": 390, "height": 800})
    requests, complaints = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(page_file.as_uri())
    assert [url for url in requests if not url.startswith("data:")] == [page_file.as_uri()]
    assert complaints == []
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "fits a telephone"
    ground, ink = page.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        ".map(c => c.match(/[0-9]+/g).map(Number).reduce((a, b) => a + b))"
    )
    assert (ground > ink) == (scheme == "light")
    page.close()


def test_curves_are_read_by_keyboard(browser, page_file):
    page = browser.new_page()
    page.goto(page_file.as_uri())
    page.keyboard.press("Tab")
    chart = page.locator("figure.score")
    assert chart.locator("svg").evaluate("element => element === document.activeElement")
    said = chart.locator("output")
    page.keyboard.press("Home")
    assert said.inner_text() == "step 1: 0.01"
    page.keyboard.press("ArrowRight")
    assert said.inner_text() == "step 2: 0.02"
    page.keyboard.press("End")
    assert said.inner_text() == "step 100: 1"
    assert chart.locator(".cursor").is_visible()
    page.keyboard.press("Tab")
    assert not chart.locator(".cursor").is_visible()
    page.close()


def test_every_curve_has_a_name_and_a_description(browser, page_file):
    page = browser.new_page()
    page.goto(page_file.as_uri())
    names = page.get_by_role("img").evaluate_all(
        "all => all.map(svg => svg.getAttribute('aria-labelledby').split(' ')"
        ".map(id => document.getElementById(id).textContent))"
    )
    assert len(names) >= 3
    assert ["Score", "Score: 0.01 at step 1, 1 at step 100. Arrow keys read single values."] in names
    page.close()
