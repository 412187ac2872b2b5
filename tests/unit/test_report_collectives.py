"""What `ddtrace-pytorch report` says of collectives, on run logs with records as sessions write them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ddtrace_pytorch.cli.main import cli
from ddtrace_pytorch.cli.tables import size, span, speed
from ddtrace_pytorch.histogram import BUCKETS, percentile
from ddtrace_pytorch.runlog.schema import encode

SECOND = 1_000_000_000
T0 = 1_790_000_000 * SECOND
RANK_0 = [3, 1, 2, 4, 1.5]
RANK_1 = [1, 3, 2.5, 2, 4]


def write(root: Path, rank: int, *records: dict[str, Any], world_size: int = 2, seconds: float = 10.0) -> None:
    identity = {
        "type": "identity", "ts": T0, "schema": 1, "rank": rank, "world_size": world_size, "host": "h", "node": "h",
        "pid": 1 + rank, "source": "trainer", "job": {"id": "7", "source": "SLURM_JOB_ID", "incarnation": "i"},
    }  # fmt: skip
    beat = {"type": "beat", "ts": T0 + round(seconds * SECOND), "seq": 1}
    path = root / "7" / "i" / f"rank-{rank:05}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(encode(record) for record in (identity, *records, beat)))


def summary(
    operation: str = "all_reduce", times_ms: tuple[float, ...] = (), how: str = "waited", **more: Any
) -> dict[str, Any]:
    """What the session of one rank tells of calls that took `times_ms` and moved 1 MB each."""
    source = {"waited": "completion", "issued": "issue", "native": "none"}[how]
    tags = {
        "collective.op": operation,
        "collective.group": "world",
        "collective.group_name": "0",
        "collective.backend": "gloo",
        "collective.time_source": source,
        "collective.slowest_at": "/code/train.py:12",
    }
    total = sum(times_ms)
    metrics = {
        "collective.group_size": 2,
        "collective.count": len(times_ms),
        "collective.bytes": len(times_ms) * 1_000_000,
        "collective.time_ms.total": total,
        "collective.time_ms.max": max(times_ms, default=0),
    }
    if source == "completion" and total:
        speed = len(times_ms) / total  # MB/ms
        metrics |= {"collective.algbw_gbps": speed, "collective.busbw_gbps": speed * 1.5}
    buckets: dict[str, int] = {}
    for ms in times_ms:
        bucket = str(round(ms * 1e6).bit_length())
        buckets[bucket] = buckets.get(bucket, 0) + 1
    return {
        "type": "summary", "ts": T0 + SECOND, "start": T0, "name": "pytorch.collectives", "resource": operation,
        "how": how, "buckets": buckets,
        "tags": tags | more.get("tags", {}), "metrics": metrics | more.get("metrics", {}),
    }  # fmt: skip


def unseen(launched: int, seen: int, **tags: str) -> dict[str, Any]:
    record = summary("unseen", tags=tags)
    record["metrics"] = {"collective.group_size": 2, "collective.count": launched - seen, **counts(launched, seen)}
    return {name: value for name, value in record.items() if name not in ("how", "buckets")}


def counts(launched: int, seen: int) -> dict[str, float]:
    return {
        "collective.group_launched": launched,
        "collective.group_seen": seen,
        "collective.group_coverage": seen / launched,
    }


def calls(took_ms: list[float], group: str = "0", **fields: Any) -> list[dict[str, Any]]:
    return [
        {"type": "call", "ts": T0, "op": "all_reduce", "group": group, "key": key, "start": T0,
         "duration": round(ms * 1e6), "bytes": 8, "source": "completion", **fields}
        for key, ms in enumerate(took_ms, 1)
    ]  # fmt: skip


def single(ms: float, key: int = 1, operation: str = "all_reduce", **tags: str) -> dict[str, Any]:
    """The finished span of one call, as DD_PYTORCH_COLLECTIVES=all and slow calls give."""
    told = {"collective.op": operation, "collective.group": "world", "collective.time_source": "completion"}
    return {
        "type": "span", "ts": T0 + SECOND, "name": "pytorch.collective", "start": T0, "duration": round(ms * 1e6),
        "tags": {**told, "collective.at": f"/home/someone/a project/src/train.py:{key}", **tags},
        "metrics": {"collective.time_ms": ms, "collective.bytes": 4_000_000, "collective.seq": key},
    }  # fmt: skip


def run(place: Path, *options: str) -> str:
    alone = {"COLUMNS": "80", "DD_PYTORCH_STATE_DIR": "/nonexistent"}
    result = CliRunner().invoke(cli, ["report", str(place), *options], env=alone)
    assert result.exit_code == 0, result.output
    assert result.exception is None
    return result.stdout


def attempt(place: Path) -> dict[str, Any]:
    found: dict[str, Any]
    (found,) = json.loads(run(place, "--json"))["attempts"]
    return found


GROUP_KEYS = "group name size backend cross_node launched seen coverage operations unseen ranks_told"
OPERATION_KEYS = """operation how time_source ranks calls calls_least calls_most bytes time_ms algbw_gbps busbw_gbps
                    waits wait_ms errors slowest_at slowest_rank"""
CALL_KEYS = "rank operation group key time_source time_ms bytes at"
STRAGGLER_KEYS = "group name calls first_step_calls unmatched late_rank late_share late_by_chance ranks"
LATENESS_KEYS = "rank made_others_wait_ms waited_for_others_ms late_calls typical_wait_ms"


def test_the_keys_of_the_json_are_the_documented_ones(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path, rank, summary(times_ms=(1,)), single(1), *calls([1 + rank]))
    found = attempt(tmp_path)
    assert list(found["slowest_calls"][0]) == CALL_KEYS.split()
    (group,), (straggler,) = found["collectives"], found["stragglers"]
    assert list(group) == GROUP_KEYS.split()
    assert list(group["operations"][0]) == OPERATION_KEYS.split()
    assert list(group["operations"][0]["time_ms"]) == ["total", "mean", "p50", "p95", "p99", "max"]
    assert list(straggler) == STRAGGLER_KEYS.split()
    assert list(straggler["ranks"][0]) == LATENESS_KEYS.split()


def test_totals_are_sums_over_summaries_and_ranks_and_percentiles_are_of_all_calls(tmp_path: Path) -> None:
    first, second, other = (1.0, 2.0, 3.0), (40.0,), (1.0, 1.0, 1.0)
    write(tmp_path, 0, summary(times_ms=first), summary(times_ms=second, tags={"collective.slowest_at": "a.py:9"}))
    write(tmp_path, 1, summary(times_ms=other))
    (group,) = attempt(tmp_path)["collectives"]
    (one,) = group["operations"]
    every = (*first, *second, *other)
    assert (one["ranks"], one["calls"], one["calls_least"], one["calls_most"]) == (2, 7, 3, 4)
    assert one["bytes"] == 7_000_000
    assert one["time_ms"]["total"] == pytest.approx(sum(every))
    assert one["time_ms"]["mean"] == pytest.approx(sum(every) / 7)
    assert one["time_ms"]["max"] == 40
    merged = [0] * BUCKETS
    for ms in every:
        merged[round(ms * 1e6).bit_length()] += 1
    for share in (50, 95, 99):
        assert one["time_ms"][f"p{share}"] == pytest.approx(percentile(merged, share / 100, 40_000_000) / 1e6)
    assert (one["slowest_at"], one["slowest_rank"]) == ("a.py:9", 0)
    assert one["algbw_gbps"] == pytest.approx(7 / sum(every))
    assert one["busbw_gbps"] == pytest.approx(1.5 * 7 / sum(every))
    shown = run(tmp_path)
    assert "all_reduce   3-4 3.50MB 24.5ms" in shown
    assert "slowest all_reduce: 40ms on rank 0 at a.py:9" in shown


def test_a_time_of_issue_has_no_bandwidth_and_is_marked(tmp_path: Path) -> None:
    waits = {"collective.waits": 2, "collective.wait_ms.total": 8.0}
    write(tmp_path, 0, summary(times_ms=(0.05, 0.06), how="issued", metrics=waits), summary(times_ms=(1.0,)))
    write(tmp_path, 1, summary(times_ms=(1.0,)), summary("all_gather_into_tensor", how="native"))
    (group,) = attempt(tmp_path)["collectives"]
    by_how = {one["how"]: one for one in group["operations"]}
    assert (by_how["issued"]["time_source"], by_how["issued"]["busbw_gbps"]) == ("issue", None)
    assert (by_how["issued"]["waits"], by_how["issued"]["wait_ms"]) == (2, 8.0)
    assert by_how["waited"]["calls"] == 2
    assert by_how["native"]["time_ms"] is None
    shown = run(tmp_path)
    assert "all_reduce*" in shown
    assert "* time to issue the call; when it was complete isn't known" in shown
    assert "waited for all_reduce*: 8ms" in shown


def test_a_group_none_of_whose_collectives_was_seen_is_no_silent_zero(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path, rank, unseen(352, 0))
    (group,) = attempt(tmp_path)["collectives"]
    assert (group["launched"], group["seen"], group["coverage"], group["operations"]) == (352, 0, 0.0, [])
    assert "world: 2 ranks, gloo; 0 of 352 launched were seen" in run(tmp_path)


def test_coverage_is_the_last_word_of_the_rank_that_saw_least(tmp_path: Path) -> None:
    write(tmp_path, 0, *(summary(times_ms=(1,), metrics=counts(many, many)) for many in (10, 20)))
    write(tmp_path, 1, summary(times_ms=(1,), metrics=counts(20, 15)))
    (group,) = attempt(tmp_path)["collectives"]
    assert (group["launched"], group["seen"], group["coverage"]) == (20, 15, 0.75)
    write(tmp_path, 1, summary(times_ms=(1,), metrics=counts(20, 20)))
    assert "all 20 launched were seen" in run(tmp_path)
    for rank in (0, 1):
        write(tmp_path, rank, summary(times_ms=(1,)))
    assert attempt(tmp_path)["collectives"][0]["coverage"] is None
    assert "torch doesn't count what it launched" in run(tmp_path)


@pytest.mark.parametrize(
    ("tag", "value", "says"),
    [("true", True, ", across nodes"), ("false", False, ", on one node"), (None, None, "gloo;")],
)
def test_whether_a_group_crosses_nodes(tmp_path: Path, tag: str | None, value: bool | None, says: str) -> None:
    write(tmp_path, 0, summary(times_ms=(1,), tags={} if tag is None else {"collective.cross_node": tag}))
    assert attempt(tmp_path)["collectives"][0]["cross_node"] is value
    assert says in run(tmp_path)


def test_the_waiting_of_each_rank_for_the_others(tmp_path: Path) -> None:
    for rank, took in enumerate((RANK_0, RANK_1)):
        write(tmp_path, rank, summary(times_ms=tuple(took)), *calls(took), seconds=0.1)
    (straggler,) = attempt(tmp_path)["stragglers"]
    assert (straggler["group"], straggler["calls"], straggler["late_rank"]) == ("world", 5, 0)
    zero, one = straggler["ranks"]
    assert (zero["waited_for_others_ms"], zero["made_others_wait_ms"]) == (4.0, 5.0)
    assert (one["waited_for_others_ms"], one["made_others_wait_ms"]) == (5.0, 4.0)
    shown = run(tmp_path)
    assert "Who waited for whom in 5 sampled calls of world" in shown
    assert "is late" not in shown, "5 ms against 4 ms are no reason to name anybody"


def late(tmp_path: Path, seconds: float) -> str:
    slow, fast = [200.0] * 30, [1.0] * 30
    for rank in range(3):
        took = fast if rank == 1 else slow
        write(tmp_path, rank, summary(times_ms=tuple(took)), *calls(took), world_size=3, seconds=seconds)
    return run(tmp_path)


def test_the_last_line_names_the_rank_that_made_the_others_wait(tmp_path: Path) -> None:
    shown = late(tmp_path, seconds=10)
    said = "rank 1 is late: it made the others wait 199ms, typically, in 30 of 30 sampled calls of world"
    assert shown.splitlines()[-1] == said
    assert "   1  h        10.0s  5.97s  no end recorded" in shown


def test_waiting_that_cost_nearly_nothing_is_not_told_of(tmp_path: Path) -> None:
    shown = late(tmp_path, seconds=1000)
    assert "late" not in shown
    assert "Who waited" not in shown
    assert "Late" not in shown


def test_groups_are_joined_each_by_itself(tmp_path: Path) -> None:
    # The same numbers in two groups; rank 1 is late in one, rank 0 in the other.
    write(tmp_path, 0, *calls([5], "dp"), *calls([1], "tp"))
    write(tmp_path, 1, *calls([1], "dp"), *calls([9], "tp"))
    found = {one["name"]: one for one in attempt(tmp_path)["stragglers"]}
    assert (found["dp"]["late_rank"], found["dp"]["ranks"][1]["made_others_wait_ms"]) == (1, 4.0)
    assert (found["tp"]["late_rank"], found["tp"]["ranks"][0]["made_others_wait_ms"]) == (0, 8.0)


def test_no_line_of_a_table_is_wider_than_80_columns(tmp_path: Path) -> None:
    for rank in (0, 1):
        times = tuple(123.456 + rank * index for index in range(1234 + rank))
        write(
            tmp_path, rank,
            *(summary(name, times) for name in ("all_gather_into_tensor", "reduce_scatter_tensor")),
            *calls([1.0 + 400 * rank] * 10),
        )  # fmt: skip
    shown = run(tmp_path)
    for line in shown.splitlines():
        assert len(line) <= 80 or line.startswith(("slowest ", "Calls are", "rank "))
    assert "all_gather_into_tensor" in shown, "in one piece"


def test_more_groups_and_operations_than_fit_are_counted(tmp_path: Path) -> None:
    records = [
        summary(f"operation_{number}", (1,), tags={"collective.group_name": str(group), "collective.group": str(group)})
        for group in range(9)
        for number in range(15)
    ]
    write(tmp_path, 0, *records)
    shown = run(tmp_path)
    assert "… 3 more groups (--json lists all)" in shown
    assert shown.count("… 3 more operations (--json lists all)") == 6
    assert len(attempt(tmp_path)["collectives"]) == 9


def test_a_log_without_collectives_says_nothing_of_them(tmp_path: Path) -> None:
    write(tmp_path, 0)
    found = attempt(tmp_path)
    assert (found["collectives"], found["stragglers"]) == ([], [])
    assert "Collectives" not in run(tmp_path)


def test_hostile_records_cost_their_value_not_the_report(tmp_path: Path) -> None:
    bad: list[Any] = [None, "x", -1, 2**3000, float("nan"), float("inf"), [], {}]
    records = [summary(times_ms=(1,))]
    for value in bad:
        record = summary(times_ms=(1,), how="waited")
        records.append({**record, "metrics": dict.fromkeys(record["metrics"], value), "buckets": {"5": value}})
        records.append({**record, "tags": value, "metrics": value, "buckets": {"99": 1, "-1": 1, "x": 1, "²": 1}})
        records += calls([1], key=value) + calls([1], duration=value) + calls([1], group=value) + calls([1], op=value)
    for rank in (0, 1):
        write(tmp_path, rank, *records)
    run(tmp_path)
    assert attempt(tmp_path)["collectives"]


@pytest.mark.parametrize(
    ("ms", "text"),
    [(None, "–"), (0, "0s"), (0.0004, "0.40µs"), (0.412, "412µs"), (0.99951, "1.00ms"), (7, "7ms"), (1.5, "1.50ms"),
     (16.78, "16.8ms"),
     (999.4, "999ms"), (1999, "2.00s"), (59_999, "60.0s"), (61_000, "1m01s")],
)  # fmt: skip
def test_times_at_a_glance(ms: float | None, text: str) -> None:
    assert span(ms) == text


@pytest.mark.parametrize(
    ("many", "text"),
    [(0, "0B"), (64, "64B"), (999, "999B"), (1_048_576, "1.05MB"), (2.5e15, "2.50PB"), (4e19, "40000PB")],
)
def test_sizes_at_a_glance(many: float, text: str) -> None:
    assert size(many) == text


@pytest.mark.parametrize(
    ("gbps", "text"),
    [(None, "–"), (0.001, "<0.01"), (0.14, "0.14"), (1.06, "1.1"), (9.96, "10"), (42.0, "42"), (312.4, "312")],
)
def test_speeds_at_a_glance(gbps: float | None, text: str) -> None:
    assert speed(gbps) == text


def test_what_torch_launched_by_itself_is_told_with_what_is_known_of_it(tmp_path: Path) -> None:
    def unseen(count: int, **more: Any) -> dict[str, Any]:
        tags = {"collective.op": "unseen", "collective.group": "world", "collective.group_name": "0"}
        named = {"collective.recorded_as": more.pop("name")} if "name" in more else {}
        metrics = {"collective.count": count, "collective.group_launched": 11, "collective.group_seen": 0}
        return {
            "type": "summary", "ts": T0, "name": "pytorch.collectives", "resource": "unseen",
            "tags": {**tags, **named}, "metrics": {**metrics, **{f"collective.{key}": more[key] for key in more}},
        }  # fmt: skip

    for rank in (0, 1):
        write(
            tmp_path, rank,
            unseen(3, name="all_reduce", sized=3, bytes=1000), unseen(5, name="all_reduce", sized=5, bytes=3100),
            unseen(2, name="broadcast", sized=1, bytes=512), unseen(1),
        )  # fmt: skip
    (group,) = attempt(tmp_path)["collectives"]
    assert [(one["recorded_as"], one["calls"], one["sized"], one["bytes"]) for one in group["unseen"]] == [
        ("all_reduce", 16, 16, 8200),
        ("broadcast", 4, 2, 1024),
        (None, 2, 0, 0),
    ]
    shown = run(tmp_path)
    assert "0 of 11 launched were seen" in shown
    assert "torch's own: 8 all_reduce, 4.10kB" in shown
    assert "torch's own: 2 broadcast, 512B in the 1 whose size is known" in shown
    assert "torch's own: 1 of unknown kind (" in shown
    assert "Calls are" not in shown, "no table, no legend"


@pytest.mark.parametrize("launched", [40, 4])
def test_where_ranks_wait_unseen_the_report_says_what_it_cannot_tell(tmp_path: Path, launched: int) -> None:
    """40 calls of torch's own in 20 steps are the backward passes'; 4 are the start-up's."""
    for rank in (0, 1):
        steps = ({"type": "step", "ts": T0, "step": n, "start": T0, "duration": SECOND // 10} for n in range(1, 21))
        write(tmp_path, rank, *steps, unseen(launched, 0, **{"collective.recorded_as": "all_reduce"}))
    assert ("Ranks also wait for each other in collectives that torch issues" in run(tmp_path)) is (launched == 40)


def training(launched: int, seen: int) -> list[dict[str, Any]]:
    """20 steps of 100 ms, of which 10 ms went into collectives that were timed."""
    metrics = {"collective_ns": SECOND // 100}
    steps = [
        {"type": "step", "ts": T0, "step": n, "start": T0, "duration": SECOND // 10, "metrics": metrics}
        for n in range(1, 21)
    ]
    timed = summary(times_ms=(10.0,) * seen, metrics=counts(launched, seen))
    return [*steps, timed, unseen(launched, seen, **{"collective.recorded_as": "all_reduce"})]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_nobody_timed_is_not_called_compute(tmp_path: Path, ranks: int) -> None:
    """As of DistributedDataParallel, whose all_reduces no function of Python's issues; one rank's log is enough."""
    for rank in range(ranks):
        write(tmp_path, rank, *training(60, 20))
    assert attempt(tmp_path)["steps"]["untimed"] == {"calls": 40 * ranks, "of": 60 * ranks}
    shown = run(tmp_path)
    assert "communication at least 10%, optimizer 0%, compute at most 90%" in shown
    assert re.search(r"^ +0 +20 .* 0% +≥10% +0% +≤90%$", shown, re.MULTILINE)
    assert "Of 60 collectives of a rank nobody timed 40, which torch issued by itself" in shown


@pytest.mark.parametrize("launched", [20, 24])
def test_where_communication_was_timed_its_share_is_told_as_it_is(tmp_path: Path, launched: int) -> None:
    """Four that were not are those of the start."""
    for rank in (0, 1):
        write(tmp_path, rank, *training(launched, 20))
    assert attempt(tmp_path)["steps"]["untimed"] is None
    shown = run(tmp_path)
    assert "communication 10%, optimizer 0%, compute 90%" in shown
    assert "nobody timed" not in shown


def test_where_collectives_were_not_counted_their_share_is_not_known(tmp_path: Path) -> None:
    for rank in (0, 1):
        steps = training(20, 20)[:20]
        write(tmp_path, rank, *steps, {"type": "identity", "ts": T0, "collectives": "off"})
    shown = run(tmp_path)
    assert "communication at least 10%, optimizer 0%, compute at most 90%" in shown
    assert "What collectives took is part of compute" in shown


@pytest.mark.parametrize(("many", "enough"), [(2, False), (19, False), (21, True)])
def test_a_rank_is_named_late_only_by_calls_enough(tmp_path: Path, many: int, enough: bool) -> None:
    for rank in (0, 1):
        took = [200.0 if rank == 0 else 1.0] * many
        write(tmp_path, rank, summary(times_ms=tuple(took)), *calls(took), seconds=1)
    shown = run(tmp_path)
    assert f"Who waited for whom in {many} sampled calls" in shown
    assert ("rank 1 is late" in shown) is enough
    assert ("Too few of them to tell whether any rank is late" in shown) is not enough


def test_a_log_that_just_ends_is_said_to(tmp_path: Path) -> None:
    write(tmp_path, 0, summary(times_ms=(1,)))
    assert "rank 0: killed (SIGKILL, out of memory, a lost host) or still running" in run(tmp_path)


def test_single_calls_are_listed_slowest_first(tmp_path: Path) -> None:
    write(tmp_path, 0, *(single(ms, key) for key, ms in enumerate((1, 900.5, 3), 1)))
    write(tmp_path, 1, single(40, 2), single(2000, 7, "broadcast", **{"collective.time_source": "issue"}))
    found = attempt(tmp_path)
    assert found["single_calls"] == 5
    assert [(call["rank"], call["key"], call["time_ms"]) for call in found["slowest_calls"]] == [
        (1, 7, 2000), (0, 2, 900.5), (1, 2, 40), (0, 3, 3), (0, 1, 1)
    ]  # fmt: skip
    assert found["slowest_calls"][1] == {
        "rank": 0, "operation": "all_reduce", "group": "world", "key": 2, "time_source": "completion",
        "time_ms": 900.5, "bytes": 4_000_000, "at": "/home/someone/a project/src/train.py:2",
    }  # fmt: skip
    shown = run(tmp_path)
    assert "Calls told of one by one: 5\n" in shown
    lines = shown[shown.index("Calls told of") :].splitlines()
    assert lines[1].split() == ["Rank", "Operation", "Group", "Key", "Time", "Bytes", "At"]
    assert lines[3].split()[:6] == ["1", "broadcast*", "world", "7", "2s", "4MB"]
    assert "* time to issue the call; when it was complete isn't known" in lines
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    ("options", "listed", "says"), [((), 10, "10 slowest of 12"), (("--calls", "3"), 3, "3 slowest")]
)
def test_as_many_single_calls_are_listed_as_asked_for(
    tmp_path: Path, options: tuple[str, ...], listed: int, says: str
) -> None:
    write(tmp_path, 0, *(single(7, key) for key in range(1, 13)))
    found = json.loads(run(tmp_path, "--json", *options))["attempts"][0]
    assert found["single_calls"] == 12
    assert [call["key"] for call in found["slowest_calls"]] == list(range(1, listed + 1))
    assert says in run(tmp_path, *options)


def test_none_are_listed_where_there_are_none_or_none_are_wanted(tmp_path: Path) -> None:
    write(tmp_path, 0, summary(times_ms=(1,)))
    assert "one by one" not in run(tmp_path)
    write(tmp_path, 0, single(1))
    assert "one by one" not in run(tmp_path, "--calls", "0")


def test_hostile_single_calls_cost_their_value_not_the_report(tmp_path: Path) -> None:
    nonsense = {"type": "span", "ts": T0, "name": "pytorch.collective", "tags": 7, "metrics": {"collective.seq": "x"}}
    timeless = single(1) | {"metrics": {"collective.time_ms": float("nan"), "collective.seq": "x"}}
    write(tmp_path, 0, nonsense, timeless, single(3))
    assert attempt(tmp_path)["slowest_calls"][0]["time_ms"] == 3
    assert "one by one" in run(tmp_path)


@pytest.mark.parametrize(
    ("settings", "setting", "says"),
    [(("off", "off"), "off", True), (("off", "summary"), "off, summary", False), ((None, None), "", False)],
)
def test_collectives_that_were_off_are_said_to_be(
    tmp_path: Path, settings: tuple[str | None, str | None], setting: str, says: bool
) -> None:
    for rank, one in enumerate(settings):
        write(tmp_path, rank, {"type": "identity", "ts": T0, "rank": rank} | ({"collectives": one} if one else {}))
    assert attempt(tmp_path)["collectives_setting"] == setting
    assert ("\nCollectives\nThey were not counted: DD_PYTORCH_COLLECTIVES was off.\n" in run(tmp_path)) is says
