"""`report --html`: what the page says, on run logs as trainings leave them."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from harness.training import MS, SECOND, T0, Training, stalled, total, verdict

from ddtrace_pytorch.cli.main import cli
from ddtrace_pytorch.cli.slow_groups import Talk, slow_among


def run(root: Path, *options: str) -> Result:
    return CliRunner().invoke(cli, ["report", str(root), *options], env={"COLUMNS": "200"})


def attempt(root: Path) -> dict[str, Any]:
    found: dict[str, Any]
    (found,) = json.loads(run(root, "--json").stdout)["attempts"]
    return found


def page(root: Path, *options: str) -> str:
    result = run(root, "--html", str(root / "page.html"), *options)
    assert result.exit_code == 0, result.output
    return (root / "page.html").read_text()


def text_of(html: str) -> str:
    """What a reader sees, without the pictures."""
    body = re.sub(r"<(style|script)\b.*?</\1>", " ", html, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", body).split())


SAID = "all_reduce #42 of group `world` has waited 12 s: rank 3 (node0) has not entered it"
STALL_AT = T0 + 3 * SECOND


@pytest.fixture(scope="module")
def stuck(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of four in which rank 3 loads slowly, and then is waited for until all of it is killed."""
    job = Training(tmp_path_factory.mktemp("stuck"), 4, 40, slow={3: 40.0}, ended=False)
    job.more = {
        0: [
            stalled(STALL_AT, "stall", 12.0),
            verdict(STALL_AT, [3], [0, 1, 2], SAID),
            {"type": "scalar", "ts": STALL_AT, "step": 30, "metrics": {"loss": float("nan")}},
            {"type": "drop", "ts": STALL_AT, "reason": "queue full", "count": 17, "bytes": 0},
        ],
        1: [stalled(STALL_AT + SECOND, "stall", 12.5), stalled(STALL_AT + 9 * SECOND, "stall over", 21.0)],
    }
    return job.write()


def test_the_page_tells_what_happened_and_why(stuck: Path) -> None:
    said = text_of(page(stuck))
    assert said.index("Job 4242") < said.index(SAID) < said.index("steps a second") < said.index("Step time")
    assert "rank 3 takes 40ms more of each step than the others: data loading (+40ms)" in said
    assert "1 stall 17 records dropped" in said
    assert "all_reduce #42 of world 21s rank 3 absent on 1 of 2" in said
    assert "17 records dropped: queue full" in said
    assert "1 not finite" in said
    assert "world: 4 ranks, gloo; 40 of 42 launched were seen" in said
    assert "data 15%" in said


def test_who_talks_to_whom_says_whose_last_totals_are_missing(stuck: Path, tmp_path: Path) -> None:
    assert "Partial: the log of ranks 0-3 has no end" in text_of(page(stuck))
    assert "Partial" not in text_of(page(Training(tmp_path, 2, 20).write()))


def test_the_picture_that_shows_who_is_slow_comes_first(stuck: Path, tmp_path: Path) -> None:
    for place, shown in ((stuck, "Waiting for data"), (Training(tmp_path, 2, 20).write(), "Step time")):
        assert re.findall(r"<input[^>]* checked[^>]*> ([^<]*)", page(place)) == [shown]


def test_nothing_can_be_fetched_or_run_but_what_is_ours(stuck: Path) -> None:
    html = page(stuck)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', html)
    kept = dict(part.split(" ", 1) for part in policy.replace("&#x27;", "'").split("; "))
    assert kept["default-src"] == kept["base-uri"] == kept["form-action"] == "'none'"
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    for name, text in (("style-src", style), ("script-src", script)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert kept[name] == f"'sha256-{digest}'"
    assert not re.findall(r"<(?:link|img|iframe|object|a|base|form)\b|\b(?:src|href|style)=|url\(|@import", html)


def test_the_text_report_has_all_ranks_together_and_the_stalls(stuck: Path) -> None:
    shown = run(stuck).stdout
    assert re.search(
        r"^10 steps/s: p50 \S+, p95 \S+, p99 \S+, max 100ms; data 15%, communication 40%, optimizer 8%, compute 37%$",
        shown,
        re.MULTILINE,
    )
    assert re.search(r"all_reduce #42 of world +21s +rank 3 absent +on 1 of 2", shown)
    found = attempt(stuck)
    assert found["stalls"] == [
        {"at": found["stalls"][0]["at"], "group": "world", "operation": "all_reduce", "key": 42, "kind": "absent",
         "ranks": [3], "waiting": 2, "over": 1, "unsure": 0, "waited_s": 21.0, "message": SAID}
    ]  # fmt: skip
    together = found["steps"]["all"]
    assert (together["steps"], together["per_second"], together["max_ms"]) == (40, 10.0, 100.0)
    assert sum(together[f"share_{part}"] for part in ("data", "collective", "optimizer", "compute")) == pytest.approx(1)


@pytest.mark.parametrize(
    ("how", "words"), [("went on", "yes"), ("unknown", "not known"), ("raised", "no"), ("", "yes")]
)
def test_a_stall_of_which_nobody_knows_how_it_ended_is_told_so(tmp_path: Path, how: str, words: str) -> None:
    job = Training(tmp_path, 2, 20)
    job.more = {0: [stalled(STALL_AT, "stall", 12.0), stalled(STALL_AT + SECOND, "stall over", 21.0, how=how)]}
    shown = run(job.write()).stdout
    assert re.search(rf"all_reduce #42 of world +21s +nobody found out +{words} *$", shown, re.MULTILINE)


def test_of_a_thousand_stalls_the_longest_are_shown_and_the_rest_is_counted(tmp_path: Path) -> None:
    job = Training(tmp_path, 1, 0)
    job.more = {0: [stalled(T0 + at, "stall", 10.0 + at) for at in range(1_100)]}
    for at, one in enumerate(job.more[0]):
        one["tags"]["key"] = at + 1
    found = attempt(job.write())
    assert (len(found["stalls"]), found["stalls_uncounted"]) == (1_000, 100)
    shown = run(tmp_path).stdout
    assert "… 990 shorter ones" in shown
    assert "100 more records are of stalls beyond the first 1,000" in shown
    assert re.search(r"all_reduce #1000 of world +16m49s +nobody found out +no", shown)
    assert "100 more records are of stalls beyond the first 1,000" in text_of(page(tmp_path))


def test_of_many_hosts_and_gpus_some_are_shown_and_the_rest_is_counted(tmp_path: Path) -> None:
    root = Training(tmp_path, 200, 0).write()
    shown = run(root).stdout.splitlines()
    assert len(shown) < 60
    assert max(map(len, shown)) <= 200
    assert (
        "Hosts        node0, node1, node10, node11, node12, node13, node14, node15, … 17 more (--json lists all)"
        in shown
    )
    assert "GPUs         200 H100 (--json lists them)" in shown
    assert len(attempt(root)["gpus"]) == 200
    assert len(attempt(root)["hosts"]) == 25


def test_without_a_training_the_page_says_who_was_there(tmp_path: Path) -> None:
    said = text_of(page(Training(tmp_path, 2, 0).write()))
    assert "All ranks ended well (ranks 0-1 destroyed)" in said
    assert "Step time" not in said
    assert "Nothing was dropped, no rank is missing, and all files could be read." in said


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&lt;\u202e\x1b[31m"


def test_what_a_log_says_is_text_wherever_it_is_shown(tmp_path: Path) -> None:
    job = Training(tmp_path, 2, 3, job=HOSTILE, incarnation=HOSTILE, name=HOSTILE)
    group = total(T0, HOSTILE, HOSTILE, HOSTILE, 2, 3, 100)
    group["tags"] |= {"collective.slowest_at": HOSTILE, "collective.backend": HOSTILE}
    job.more = {
        0: [
            {"type": "identity", "ts": T0, "host": HOSTILE, "versions": {HOSTILE: HOSTILE},
             "device": {"device.id": HOSTILE, "device.gpu.name": HOSTILE}},
            {"type": "user_span", "ts": T0, "name": HOSTILE, "duration": 5 * MS, "at": HOSTILE},
            {"type": "event", "ts": T0, "name": HOSTILE, "seq": 1},
            {"type": "drop", "ts": T0, "reason": HOSTILE, "count": 1},
            {"type": "span", "ts": T0, "name": "pytorch.checkpoint", "duration": MS,
             "tags": {"checkpoint.op": HOSTILE, "checkpoint.path": HOSTILE}, "metrics": {}},
            {"type": "span", "ts": T0, "name": "pytorch.collective",
             "tags": {"collective.op": HOSTILE, "collective.group": HOSTILE, "collective.at": HOSTILE},
             "metrics": {"collective.time_ms": 5.0}},
            {"type": "span", "ts": T0, "name": "pytorch.rank", "error": 1, "start": T0,
             "tags": {"pytorch.end_reason": "exception", "error.type": HOSTILE, "error.message": HOSTILE}},
            {**verdict(T0, [1], [0], HOSTILE), "group": HOSTILE, "op": HOSTILE, "kind": HOSTILE},
            group,
        ]
    }  # fmt: skip
    html = page(job.write())
    allowed = re.sub(r"<script>(?!.*<script>).*</script>", "", html, flags=re.DOTALL)  # ours is the last one
    assert not re.findall(r"<(?:img|script>)", allowed)
    assert "alert(1)</script>" not in allowed
    assert not {"\u202e", "\x1b"} & set(html)
    assert html.count("&lt;/script&gt;&lt;script&gt;alert(1)") > 15


def test_runs_of_one_folder_are_never_mixed_and_each_can_be_shown(tmp_path: Path) -> None:
    Training(tmp_path, 2, 10, incarnation="first", name="early").write()
    later = Training(tmp_path, 2, 20, incarnation="second", name="late")
    later.more = {0: [{"type": "identity", "ts": T0 + SECOND}]}
    later.write()
    for file in (tmp_path / "4242" / "second").iterdir():
        file.write_text(file.read_text().replace(str(T0)[:8], str(T0 + 10**14)[:8]))
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.jsonl")}
    last, first, both = (text_of(page(tmp_path, *("--attempt", which))) for which in ("last", "1", "all"))
    assert "attempt 2 of 2" in last
    assert "late" in last
    assert "early" not in last
    assert "attempt 1 of 2" in first
    assert "early" in first
    assert both.index("attempt 2 of 2") < both.index("attempt 1 of 2")
    assert {file: file.read_bytes() for file in tmp_path.rglob("*.jsonl")} == before


def test_what_is_broken_is_said_and_the_rest_is_drawn(tmp_path: Path) -> None:
    Training(tmp_path, 4, 20).write()
    folder = tmp_path / "4242" / "aaa"
    cut, empty, gone = (folder / f"rank-0000{rank}.jsonl" for rank in (1, 2, 3))
    cut.write_bytes(cut.read_bytes()[:-20])
    empty.write_bytes(b"")
    gone.unlink()
    (folder / "notes.txt").write_text("mine")
    said = text_of(page(tmp_path))
    assert "Ranks without a log: 2-3" in said
    assert "skipped the last line of aaa/rank-00001.jsonl, which is cut short" in said
    assert "rank-00002.jsonl is empty" in said
    assert "skipped 1 file that is no run log (notes.txt)" in said
    assert "Step time, rank by rank" in said


def test_a_page_that_cannot_be_written_is_an_error_and_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Training(tmp_path / "log", 1, 2).write()
    result = run(root, "--html", str(tmp_path / "nowhere" / "page.html"))
    assert (result.exit_code, result.exception.__class__) == (1, SystemExit)
    assert "can't write" in result.output
    there = tmp_path / "page.html"
    there.write_text("before")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    result = run(root, "--html", str(there))
    assert result.exit_code == 1
    assert "No space left on device" in result.output
    assert there.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["page.html"]


def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """As root, that would take it away from everybody."""
    root = Training(tmp_path / "log", 1, 2).write()
    device = tmp_path / "null"
    device.symlink_to(os.devnull)
    result = run(root, "--html", str(device))
    assert result.exit_code == 0, result.output
    assert device.is_char_device()
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []
    assert "can't write" in run(root, "--html", str(tmp_path / "log")).output


def test_the_page_goes_to_standard_output_too_and_json_beside_it(tmp_path: Path) -> None:
    root = Training(tmp_path, 1, 2).write()
    assert run(root, "--html", "-").stdout.startswith("<!doctype html>")
    assert json.loads(run(root, "--json", "--html", str(tmp_path / "page.html")).stdout)["job"]["id"] == "4242"
    assert (tmp_path / "page.html").exists()


def talk(name: str, ms: float, calls: int = 100, ranks: tuple[int, ...] = (0, 1), spread: float = 0.0) -> Talk:
    """`spread`: the standard deviation, as a part of the mean."""
    return Talk("tp", name, 2, "gloo", ranks, ms * calls, calls, calls * ms**2 * (1 + spread**2))


@pytest.mark.parametrize(
    ("groups", "slow"),
    [
        ([talk("a", 1), talk("b", 1.1), talk("c", 9)], ["c"]),
        ([talk("a", 1), talk("b", 9), talk("c", 5)], ["b"]),
        ([talk("a", 1), talk("b", 1.4)], []),
        ([talk("a", 9)], []),
        ([talk("a", 1), talk("b", 9, ranks=(0,))], []),
        ([talk("a", 0.001), talk("b", 0.009)], []),
        ([talk("a", 1), talk("b", 1, calls=0)], []),
        ([talk("a", 9), talk("b", 90, calls=19)], []),
        ([talk("a", 9), talk("b", 90, calls=20)], ["b"]),
        # 2 ± 0.2 and 1 ± 0.1 are nearer than four times 0.22.
        ([talk("a", 1, spread=1), talk("b", 1.88, spread=1)], []),
        ([talk("a", 1, spread=1), talk("b", 2.1, spread=1)], ["b"]),
    ],
    ids=[
        "one",
        "of three",
        "hardly",
        "alone",
        "not all told",
        "not worth it",
        "silent",
        "few calls",
        "calls enough",
        "by chance",
        "beyond chance",
    ],
)
def test_which_groups_talk_slowly(groups: list[Talk], slow: list[str]) -> None:
    assert [one.name for one in slow_among(groups, 10.0)] == slow


def test_a_group_that_talks_slowly_is_named_however_long_its_members_wait_for_each_other(tmp_path: Path) -> None:
    job = Training(tmp_path, 6, 10)
    for rank in range(6):
        # Rank 0 waits for rank 1; ranks 4 and 5 have a slow link between them.
        call_ms = {0: 40.0, 4: 12.0, 5: 11.0}.get(rank, 2.0)
        pair = rank // 2
        job.more[rank] = [total(T0, "all_reduce", "dp", f"dp{pair}", 2, 100, 1_000, call_ms)]
    root = job.write()
    (slow,) = attempt(root)["slow_groups"]
    assert (slow["group"], slow["name"], slow["ranks"], slow["alike"]) == ("dp", "dp2", [4, 5], 3)
    assert (slow["call_ms"], slow["usual_ms"], slow["lost_s"]) == pytest.approx((1078 / 99, 196 / 99, 0.882))
    sentence = (
        "ranks 4-5 talk slowly to each other: a call of their group dp takes 10.9ms, one of the 3 groups like it 1.98ms"
    )
    assert sentence in run(root).stdout
    assert sentence in text_of(page(root))
