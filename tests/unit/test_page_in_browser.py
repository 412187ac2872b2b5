"""The page of a report in a real browser, without a network: light and dark, on a desk and on a phone."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


TEXTS = [
    HOSTILE, LONG, "<script>alert(1)</script>", "<!--<script>", "]]>", "--!>", '" onload="alert(1)',
    "' onclick='alert(1)", "</style><style>*{display:none}", "</title>", "javascript:alert(1)", "{{x}}", "${alert(1)}",
    "`", "\\", "&lt;&amp;", "%3C", "\u2028\u2029", "\x00\x1b[31m\r\n", "\ud800", "\ufeff", "\u0301" * 40, "__proto__",
    "constructor", "toString", "NaN", "", "0", "null", "步骤 😀", "x" * 5_000,
]  # fmt: skip
NUMBERS = [
    0, 1, -1, 0.1, -0.0, 5e-324, 1e-300, 1e300, 1e308, -1e308, math.inf, -math.inf, math.nan, 2**31, 2**53 + 1, 2**62,
    2**63, -(2**63), 10**40, 10**400, True, None, "1e308", [1], {"": 0}, T0, -T0,
]  # fmt: skip


class Odd:
    """Records as nobody would write them."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def text(self) -> str:
        return self._random.choice(TEXTS)

    def number(self) -> Any:
        return self._random.choice(NUMBERS)

    def time(self) -> Any:
        """Most are near the others', for what is far off is all that there is to see then."""
        near = T0 + self._random.randrange(-(10**9), 5 * 10**9)
        return near if self._random.random() < 0.8 else self.number()

    def fields(self, *numbers: str) -> dict[str, Any]:
        return {self.text(): self.number(), self.text(): self.text(), **{name: self.number() for name in numbers}}

    def record(self) -> dict[str, Any]:
        ts = self._random.choice([T0, T0 + 10**9, 0, 1, -1, -T0, 2**62, T0 - 10**17])
        times = {"start": self.time(), "duration": self.number()}
        step = {"step": self.number()}
        tags = {self.text(): self.text(), "collective.group": self.text(), "collective.group_name": self.text(),
                "collective.op": self._random.choice(["all_reduce", "isend", self.text()]), "stall.key": self.number(),
                "stall.waited_s": self.number(), "checkpoint.path": self.text(), "checkpoint.op": self.text(),
                "pytorch.end_reason": self.text(), "error.type": self.text(), "error.message": self.text()}  # fmt: skip
        totals = self.fields(
            "collective.group_size", "collective.count", "collective.bytes", "collective.time_ms.total",
            "collective.time_ms.max", "collective.group_launched", "collective.group_seen", "collective.busbw_gbps",
            "checkpoint.count", "checkpoint.bytes",
        )  # fmt: skip
        span = self._random.choice(["rank", "checkpoint", "collective", self.text()])
        kinds: dict[str, dict[str, Any]] = {
            "identity": {"host": self.text(), "metadata": self.fields(), "versions": self.fields(), "tags": tags,
                         "device": {"device.id": self.text(), "device.gpu.name": self.text(), "device.kind": "cuda"}},
            "step": {**times, **step, "metrics": self.fields("data_ns", "collective_ns", "optimizer_ns")},
            "scalar": {**step, "metrics": self.fields("loss", "lr")},
            "user_span": {**times, **step, "name": self.text(), "thread": self.text(), "at": self.text()},
            "event": {"name": self._random.choice(["stall", "stall over", self.text()]), "tags": tags},
            "call": {**times, **step, "op": self.text(), "group": self.text(), "key": self.number()},
            "summary": {"start": self.time(), "name": "pytorch.collectives", "resource": self.text(), "tags": tags,
                        "metrics": totals, "buckets": self.fields("20"), "how": "waited"},
            "span": {**times, "name": f"pytorch.{span}",
                     "error": self._random.choice([0, 1]), "tags": tags, "metrics": totals},
            "beat": {"seq": self.number(), "steps": self.number(), "groups": {self.text(): [1, 0, self.text(), 5]}},
            "verdict": {"kind": self.text(), "message": self.text(), "ranks": [0, self.number()], "waiting": [1],
                        "group": self.text(), "op": self.text(), "key": self.number(), "tags": tags},
            "drop": {"reason": self.text(), "count": self.number()},
        }  # fmt: skip
        kind = self._random.choice([*kinds])
        return {"type": kind, "ts": ts, **kinds[kind]}


# Nothing that acts by itself, and nothing that leads away.
ACTS = """
[...document.querySelectorAll("*")].filter((one) =>
    (one.localName === "script" && one.parentElement !== document.body)
    || ["img", "iframe", "object", "embed", "a", "link", "base", "form"].includes(one.localName)
    || [...one.attributes].some(({name}) => name.startsWith("on") || name === "href" || name === "src"))
    .map((one) => one.outerHTML.slice(0, 200))
"""

# Everywhere in all pictures, and all choices that there are.
EVERYWHERE = """
(() => {
    for (const choice of [null, ...document.querySelectorAll("input, summary")]) {
        if (choice) choice.click();
        for (const canvas of document.querySelectorAll(".picture canvas")) {
            const box = canvas.getBoundingClientRect();
            for (let at = 0; at <= 100; at += 1) {
                const across = (at % 10) / 10, down = Math.floor(at / 10) / 10;
                canvas.dispatchEvent(new PointerEvent("pointermove", {
                    clientX: box.left + across * box.width, clientY: box.top + down * box.height, bubbles: true}));
            }
        }
    }
    return [...document.querySelectorAll(".tip")].map((tip) => tip.textContent).join("");
})()
"""


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_in_a_log_is_shown_and_never_run(browser: Browser, tmp_path: Path, seed: int) -> None:
    odd = Odd(seed)
    job = Training(tmp_path / "log", 3, 4, job=odd.text() or HOSTILE, name=odd.text())
    root = job.write()
    for file in sorted(root.rglob("*.jsonl")):
        # As another writer than ours might have it.
        lines = (json.dumps(odd.record()) for _ in range(150))
        with file.open("a") as log:
            log.writelines(f"{line}\n" for line in lines)
    (root / "<script>alert(3)<-script>\u2028'\".jsonl").touch()
    page = tmp_path / "page.html"
    result = CliRunner().invoke(cli, ["report", str(root), "--html", str(page)])
    assert result.exit_code == 0, result.output + repr(result.exception)
    for width in (1280, 390):
        look = browser.open(page, dark=width == 390, width=width, phone=width == 390)
        said = browser.run(EVERYWHERE)
        assert look.complaints == []
        assert look.requests == [page.as_uri()]
        assert browser.run(ACTS) == []
        assert browser.run("document.querySelectorAll('script').length") == 2
        assert browser.run("document.documentElement.scrollWidth") <= width
        assert "rank" in said, "there is a picture"
        assert "NaN" not in said
        assert "Infinity" not in said
        assert "undefined" not in said
