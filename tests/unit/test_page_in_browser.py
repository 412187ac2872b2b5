"""The page of a report in a real browser, without a network: light and dark, on a desk and on a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from harness import chromium
from harness.chromium import Browser, needs_chromium
from harness.training import SECOND, T0, Training, stalled, verdict

from ddtrace_pytorch.cli.main import cli

pytestmark = [pytest.mark.once, needs_chromium]

HOSTILE = "</script><script>alert(1)</script><img src=//example.com/x onerror=alert(2)>\"'\u202e"
LONG = "a_name_without_a_place_to_break_" * 8


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium.browser(tmp_path_factory.mktemp("chromium")) as one:
        yield one


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of a small job that stood still, and one of 1,024 ranks whose names are not kind."""
    place = tmp_path_factory.mktemp("pages")
    stuck = Training(place / "stuck", 4, 40, slow={3: 40.0}, ended=False)
    stuck.more = {0: [stalled(T0 + SECOND, "stall", 12.0), verdict(T0 + SECOND, [3], [0, 1, 2], f"it waits {LONG}")]}
    many = Training(place / "many", 1_024, 10, slow={777: 40.0}, job=HOSTILE, name=HOSTILE)
    many.more = {0: [{"type": "user_span", "ts": T0, "name": HOSTILE, "duration": 5, "at": LONG}]}
    made = {}
    for name, job in (("stuck", stuck), ("many", many)):
        made[name] = place / f"{name}.html"
        result = CliRunner().invoke(cli, ["report", str(job.write()), "--html", str(made[name])])
        assert result.exit_code == 0, result.output
    return made


LOOKS = [(False, 1280), (True, 1280), (False, 390), (True, 390)]

# The pixels of a canvas: of a copy, for a browser complains of who reads from one that it paints quickly.
PIXELS = """
const pixels_of = (canvas) => {
    const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", {willReadFrequently: true});
    copy.drawImage(canvas, 0, 0);
    return copy.getImageData(0, 0, canvas.width, canvas.height);
};
"""

# How many colours a picture has where its ranks are, and how much of it is painted at all.
PAINTED = f"""
(() => {{
    {PIXELS}
    return [...document.querySelectorAll(".picture canvas")].map((canvas) => {{
        const pixels = new Uint32Array(pixels_of(canvas).data.buffer);
        return [new Set(pixels).size, pixels.filter((pixel) => pixel !== 0).length / pixels.length];
    }});
}})()
"""

POINTED = """
(() => {
    const canvas = document.querySelector(".picture canvas"), box = canvas.getBoundingClientRect();
    const at = {clientX: box.left + box.width / 2, clientY: box.top + 30, bubbles: true};
    canvas.dispatchEvent(new PointerEvent("pointermove", at));
    return document.querySelector(".tip").textContent;
})()
"""

# Of pixels in the picture's middle column, how many are of the warm end of the scale.
WARM = f"""
(() => {{
    {PIXELS}
    const {{data, width, height}} = pixels_of(document.querySelector(".picture canvas"));
    const rows = Array.from({{length: height - 50}}, (_, row) => 4 * (row * width + Math.round(width / 2)));
    return rows.filter((at) => data[at] > data[at + 2] + 30).length;
}})()
"""


@pytest.mark.parametrize("name", ["stuck", "many"])
def test_it_is_readable_everywhere_and_asks_for_nothing(
    browser: Browser, pages: dict[str, Path], name: str, tmp_path: Path
) -> None:
    page = pages[name]
    assert page.stat().st_size < 3_000_000
    backgrounds = set()
    for dark, width in LOOKS:
        look = browser.open(page, dark=dark, width=width, phone=width < 500)
        assert look.complaints == []
        assert look.requests == [page.as_uri()]
        assert browser.run("document.documentElement.scrollWidth") <= width
        (colours, share), (others, some) = browser.run(PAINTED)
        assert colours > 10
        assert others > 10
        assert share > 0.5
        assert some > 0.05
        backgrounds.add(browser.run("getComputedStyle(document.body).backgroundColor"))
        browser.screenshot(tmp_path / f"{name}-{'dark' if dark else 'light'}-{width}.png")
    assert len(backgrounds) == 2
    assert all(shot.stat().st_size > 20_000 for shot in tmp_path.glob("*.png"))


def test_pointing_at_a_picture_tells_its_numbers_and_another_layer_can_be_chosen(
    browser: Browser, pages: dict[str, Path]
) -> None:
    look = browser.open(pages["stuck"], dark=False, width=1280)
    assert "rank 1 · node0" in browser.run(POINTED)
    # The slow rank is one of four rows; all steps are as long.
    assert "waiting for data ≈ 5" in browser.run(POINTED)
    assert browser.run(WARM) > 20
    browser.run("document.querySelectorAll('.choice input')[1].click()")
    assert "without collectives ≈ 50" in browser.run(POINTED)
    browser.run("document.querySelectorAll('.choice input')[0].click()")
    assert "step time ≈ 100" in browser.run(POINTED)
    assert browser.run(WARM) == 0
    assert look.complaints == []


def test_names_that_are_markup_are_shown_as_text(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["many"], dark=False, width=1280)
    assert browser.run("document.querySelectorAll('img, script').length") == 2, "the page's own data and script"
    shown = HOSTILE.replace("\u202e", "\\u202e")
    assert browser.run("document.querySelector('h1').textContent") == f"Job {shown}"
    assert shown in browser.run("document.querySelector('.plots').textContent")
