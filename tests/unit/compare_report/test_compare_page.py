"""report.html in a browser: no error, no request, the planted module hot, a click opens it; small enough, inert."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from report_toy import HOSTILE, make_diagnosis

from trainfer.check.diagnose import Diagnosis
from trainfer.check.report.comparison import EQUAL, NOT_FINITE, encode_errors, script_json

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
FAULT = "layers.1.mlp.2"

browsers = pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield browser
        browser.close()


class Visit:
    """An open page, with whatever it complained about or asked for."""

    def __init__(self, browser: Browser, path: Path, **options) -> None:
        self.page: Page = browser.new_page(viewport={"width": 1280, "height": 900}, **options)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(f"dialog {dialog.message}"))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def assert_quiet(self) -> None:
        assert self.complaints == []
        assert len(self.requests) == 1, self.requests


@pytest.fixture(scope="module")
def report(faulty: Diagnosis, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faulty.write(tmp_path_factory.mktemp("page")) / "report.html"


def colour_at(page: Page, module: str, column: float) -> list[int]:
    """Red, green, blue of the heat map beside a module's name, at a share of its width."""
    return page.evaluate(
        """([module, column]) => {
          const line = document.querySelector(`#tree .name[data-module="${module}"]`).parentElement;
          const row = [...line.parentElement.children].indexOf(line);
          const canvas = document.getElementById("heat");
          const scale = canvas.width / canvas.clientWidth;
          const pixel = canvas.getContext("2d").getImageData(canvas.width * column, (row * 18 + 9) * scale, 1, 1).data;
          return [...pixel].slice(0, 3);
        }""",
        [module, column],
    )


@browsers
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_opens_without_errors_or_requests_in_light_and_dark(browser: Browser, report: Path, scheme: str):
    visit = Visit(browser, report, color_scheme=scheme)
    background = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) > 380) == (scheme == "light")
    visit.assert_quiet()
    visit.page.close()


@browsers
def test_the_planted_module_is_hot_and_the_one_before_is_not(browser: Browser, report: Path):
    visit = Visit(browser, report, color_scheme="light")
    visit.assert_quiet()
    hot, cold = colour_at(visit.page, FAULT, 0.5), colour_at(visit.page, "layers.1.mlp.0", 0.5)
    assert hot[0] > 130 > hot[2], f"red, not blue or grey: {hot}"
    assert max(cold) - min(cold) < 12, f"grey: {cold}"
    assert FAULT in visit.page.locator("#readout").text_content()
    visit.page.close()


@browsers
def test_a_click_on_the_map_opens_the_module(browser: Browser, report: Path):
    visit = Visit(browser, report)
    line = visit.page.locator(f'#tree .name[data-module="{FAULT}"]')
    line.scroll_into_view_if_needed()
    box, heat = line.bounding_box(), visit.page.locator("#heat").bounding_box()
    visit.page.mouse.click(heat["x"] + heat["width"] / 2, box["y"] + box["height"] / 2)
    assert visit.page.locator("#detail").get_attribute("open") is not None
    assert visit.page.locator("#detail-title").text_content() == FAULT
    assert "diverged" in visit.page.locator("#detail-status").text_content()
    visit.page.keyboard.press("Escape")
    assert visit.page.locator("#detail").get_attribute("open") is None
    visit.assert_quiet()
    visit.page.close()


@browsers
def test_the_map_is_usable_by_keyboard(browser: Browser, report: Path):
    visit = Visit(browser, report)
    page = visit.page
    page.locator("#heat").focus()
    before = page.locator("#readout").text_content()
    page.keyboard.press("ArrowRight")
    after = page.locator("#readout").text_content()
    assert before != after
    assert "position 1 " in after
    page.keyboard.press("Enter")
    assert page.locator("#detail-title").text_content() == FAULT
    visit.assert_quiet()
    page.close()


@browsers
def test_tables_sort_and_sequences_change(browser: Browser, report: Path):
    visit = Visit(browser, report)
    page = visit.page
    page.get_by_role("button", name="Introduced", exact=True).click()
    assert FAULT in page.locator("#modules tbody tr").first.text_content()
    assert page.locator("#modules th[aria-sort]").get_attribute("aria-sort") == "descending"
    page.get_by_role("button", name="Introduced", exact=True).click()
    assert FAULT not in page.locator("#modules tbody tr").first.text_content()
    tokens = page.locator("#tokens button").count()
    page.locator("#next").click()
    assert page.locator("#tokens button").count() == tokens // 2
    visit.assert_quiet()
    page.close()


@browsers
def test_hostile_texts_are_shown_and_not_run(browser: Browser, report: Path):
    visit = Visit(browser, report)
    shown = " ".join(visit.page.locator("#tokens button").all_text_contents())
    assert HOSTILE[0] in shown
    assert HOSTILE[3] in shown, "Chinese is readable"
    assert visit.page.locator("img").count() == 0
    assert visit.page.evaluate("document.scripts.length") == 2
    visit.assert_quiet()
    visit.page.close()


@browsers
def test_a_comparison_without_rows_still_opens(browser: Browser, clean: Diagnosis, tmp_path: Path):
    visit = Visit(browser, clean.write(tmp_path) / "report.html")
    assert "Equal" in visit.page.locator(".verdict").text_content()
    visit.assert_quiet()
    visit.page.close()


def test_thirty_layers_and_four_thousand_tokens_fit_five_megabytes(tmp_path: Path):
    texts = dict.fromkeys(range(32), "token")
    diagnosis = make_diagnosis(tmp_path, layers=30, length=2731, fault="layers.20.mlp.2", texts=texts)
    assert sum(len(record.tokens) for record in diagnosis.comparison.rollout_sequences) == 4096
    page = diagnosis.write(tmp_path / "out") / "report.html"
    assert page.stat().st_size <= 5_000_000
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", page.read_text(encoding="utf-8"))


def test_errors_are_coded_in_one_byte():
    codes = encode_errors(np.array([0.0, 1e-12, 1e-9, 1e-3, 1e3, 1e9, np.inf, np.nan], dtype=np.float32))
    assert codes.tolist() == [EQUAL, 2, 2, 128, 254, 254, NOT_FINITE, NOT_FINITE]


def test_data_cannot_leave_its_script_element():
    text = script_json({"a": "</script><!--\u2028&"})
    assert "<" not in text
    assert "\u2028" not in text
    assert "&" not in text
