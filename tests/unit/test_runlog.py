"""The run log on real files: what is written is read back, and what can't be written is counted."""

from __future__ import annotations

import errno
import gzip
import json
import math
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections import Counter, deque
from pathlib import Path

import pytest
from harness.disk import fill, small_disk
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtrace_pytorch.runlog import reader, schema, writer
from ddtrace_pytorch.runlog.left_behind import LeftBehind
from ddtrace_pytorch.runlog.reader import read, read_file, scan
from ddtrace_pytorch.runlog.writer import LogUnusable, RunLogFile, RunLogQueue, RunLogWriter, log_directory

ROOT = Path(__file__).parents[2]
NOW = 1_790_000_000_000_000_000
MIB = 1024 * 1024


def identity(rank=0, job="4242", incarnation="aaa", host="host-a", ts=NOW, **more):
    return {
        "ts": ts,
        "schema": schema.SCHEMA_VERSION,
        "rank": rank,
        "world_size": 2,
        "host": host,
        "pid": os.getpid(),
        "job": {"id": job, "incarnation": incarnation},
        **more,
    }


def beat(seq, pad=""):
    return {"type": "beat", "ts": NOW + seq, "seq": seq, "pad": pad}


def open_log(directory, rank=0, max_bytes=MIB, **more):
    return RunLogFile(str(directory), rank, lambda: identity(rank), max_bytes, **more)


def everything(directory):
    """All records below `directory`, and the notes made on the way."""
    found = scan(str(directory))
    records = [record for log in found.logs for record in read(log)]
    return records, found.notes + [note for log in found.logs for note in log.notes]


def kept_and_lost(directory):
    records, _ = everything(directory)
    lost = Counter()
    for record in records:
        if record["type"] == "drop":
            lost[record["reason"]] += record["count"]
    return [record["seq"] for record in records if record["type"] == "beat"], lost


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def python(code, *args, **options):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 64 KiB."""
    with small_disk(tmp_path / "disk", "64k") as disk:
        yield disk


# ---- schema ----

text = st.text(st.characters(blacklist_categories=["Cs"]), max_size=20)
numbers = st.one_of(st.integers(-(2**127), 2**127), st.floats())
plain = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**127), 2**127), st.floats(allow_nan=False, allow_infinity=False), text
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(text, inner, max_size=4)),
    max_leaves=12,
).filter(lambda value: depth(value) < schema.MAX_DEPTH)


def depth(value):
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(depth, inner), default=0)


def same(one, other):
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one == other and type(one) is type(other)


def strict_json(line):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(line.decode("ascii"), parse_constant=refuse)


@given(st.dictionaries(text.filter(lambda key: key != "metrics"), plain), st.dictionaries(text, numbers))
def test_a_record_comes_back_as_it_was(fields, metrics):
    record = {**fields, "type": "scalar", "ts": NOW, "metrics": metrics}

    line = schema.encode(record)

    strict_json(line)
    assert line.count(b"\n") == 1
    assert line.startswith(b'{"type":"scalar","ts":')
    assert same(schema.decode(line), record)


@given(st.text(st.characters(categories=["L", "So", "Cs"]), max_size=30))
def test_text_with_lone_surrogates_is_written_as_utf8_and_stays_tellable(value):
    record = schema.decode(schema.encode({"type": "event", "ts": NOW, "name": value, "tags": {value: 1}}))

    readable = value.encode("utf-8", "backslashreplace").decode()
    assert (record["name"], record["tags"]) == (readable, {readable: 1})


def test_values_json_has_not_become_their_types_name_never_their_repr():
    class Secret:
        def __repr__(self):
            return "password"

        __str__ = __repr__

    loop: dict = {}
    loop["self"] = loop
    line = schema.encode(
        {"type": "event", "ts": NOW, "a": Secret(), "b": {Secret(): b"bytes"}, "c": loop, "d": 10**6000, "e": math.nan}
    )

    record = strict_json(line)
    assert b"password" not in line
    assert (record["a"], record["b"], record["d"], record["e"]) == ("Secret", {"Secret": "bytes"}, "int", "NaN")
    assert schema.decode(line) is not None


@given(st.binary(max_size=200))
def test_any_bytes_are_a_record_or_none(line):
    record = schema.decode(line)
    assert record is None or (isinstance(record["type"], str) and isinstance(record["ts"], int))


@pytest.mark.parametrize(
    "line", [b"", b"\n", b"null", b"[1]", b'{"type":1,"ts":1}', b'{"type":"a","ts":true}', b'{"ts":1}', b"[" * 100_000]
)
def test_what_is_no_record_decodes_to_none(line):
    assert schema.decode(line) is None


@given(st.text(max_size=150))
def test_a_safe_name_is_one_harmless_path_part(value):
    name = schema.safe_name(value)

    assert 0 < len(name) <= 100
    assert name.isascii()
    assert all(char.isalnum() or char in "._-" for char in name)
    assert name.strip(".")


@given(st.lists(st.text("ab/.\x00ü", max_size=6), unique=True, max_size=50))
def test_two_ids_never_share_a_folder(ids):
    assert len({schema.safe_name(value) for value in ids}) == len(ids)


@pytest.mark.parametrize("value", ["4242", "job-1.a_B", "x" * 100])
def test_a_harmless_id_is_its_own_name(value):
    assert schema.safe_name(value) == value


@given(st.integers(0, 10**6), st.integers(0, 50), st.integers(0, 10**6), st.booleans())
def test_a_file_name_says_what_went_into_it(rank, claim, segment, compressed):
    name = schema.SegmentName(rank, claim, segment, compressed)
    assert schema.parse_name(str(name)) == name


def test_file_names_of_one_process_sort_in_the_order_written():
    names = [str(schema.SegmentName(3, 0, segment, compressed=segment < 11)) for segment in range(12)]
    assert names[0] == "rank-00003.jsonl.gz"
    assert sorted(names) == names


@pytest.mark.parametrize(
    "name", ["rank-1.jsonl", "rank-00001.json", "rank-00001.jsonl.gz.tmp", "rank-0000١.jsonl", "x"]
)
def test_other_files_names_are_not_ours(name):
    assert schema.parse_name(name) is None


# ---- queue ----


def test_a_full_queue_refuses_and_counts_each_record():
    queue = RunLogQueue(limit_records=10)
    for seq in range(25):
        queue.put(beat(seq))

    records, refused = queue.take()

    assert [record["seq"] for record in records] == list(range(10))
    assert refused == 15
    assert queue.take() == ([], 0)
    queue.put(beat(99))
    assert queue.take() == ([beat(99)], 0)


def test_the_queue_is_bounded_in_bytes_too():
    queue = RunLogQueue(limit_bytes=MIB)
    for seq in range(100):
        queue.put(beat(seq, pad="x" * 100_000))
    records, refused = queue.take()
    assert 1 <= len(records) <= 10
    assert len(records) + refused == 100


def test_what_two_threads_take_at_once_each_gets_in_part():
    """At the end, of handlers that are slow, what they haven't taken is counted while they do."""

    class Overtaken(deque):
        def popleft(self):
            taken = super().popleft()
            if self:
                elsewhere.extend(queue.take()[0])
            return taken

    queue, elsewhere = RunLogQueue(), []
    queue._records = Overtaken([1, 2, 3])
    assert sorted([*queue.take()[0], *elsewhere]) == [1, 2, 3]


def test_no_record_is_lost_or_counted_twice_between_threads():
    queue = RunLogQueue(limit_records=100)
    threads = [threading.Thread(target=lambda: [queue.put(beat(n)) for n in range(20_000)]) for _ in range(4)]
    kept = lost = 0
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        records, refused = queue.take()
        kept, lost = kept + len(records), lost + refused
    records, refused = queue.take()
    assert lost > 0
    assert kept + lost + len(records) + refused == 80_000


# ---- writer ----


def test_files_are_private_and_begin_with_the_identity(tmp_path):
    root = tmp_path / "root"
    log = open_log(log_directory(str(root), "a/b", "inc"), rank=3)
    log.open()

    path = Path(log.path)
    assert path.name == "rank-00003.jsonl"
    assert path.parent.parent.parent == root
    first = schema.decode(path.read_bytes())
    assert (first["type"], first["rank"], first["segment"]) == ("identity", 3, 0)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for folder in (path.parent, path.parent.parent, root):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_nothing_is_made_before_there_is_something_to_write(tmp_path):
    log = open_log(tmp_path / "run")
    log.write()
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_rotation_keeps_under_the_cap_and_the_sum_exact(tmp_path):
    cap = 60_000
    log = open_log(tmp_path, max_bytes=cap)
    noise = random.Random(1)
    total = 0
    for batch in range(150):
        log.write([beat(total + n, pad=noise.randbytes(30).hex()) for n in range(20)])
        total += 20
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= cap, batch
    log.close()

    kept, lost = kept_and_lost(tmp_path)

    assert lost["log cap"] > 0
    assert kept == list(range(total - len(kept), total))
    assert len(kept) + lost["log cap"] == total
    files = sorted(tmp_path.iterdir())
    assert [path.suffix for path in files] == [".gz"] * (len(files) - 1) + [".jsonl"]
    numbers = []
    for path in files:
        first = next(read_file(str(path), []))
        assert first["type"] == "identity"
        numbers.append(first["segment"])
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_all_logs_of_a_process_that_makes_its_group_anew_share_one_cap(tmp_path):
    cap, noise, total = 60_000, random.Random(1), 0
    left = LeftBehind()
    another = open_log(tmp_path / "job" / "another process", max_bytes=cap)
    another.write([beat(0)])
    another.close()
    for life in range(12):
        log = open_log(tmp_path / "job" / str(life), max_bytes=cap, left=left.of(str(tmp_path), 0).segments)
        for _ in range(20):
            log.write([beat(total + n, pad=noise.randbytes(30).hex()) for n in range(20)])
            total += 20
            taken = sum(path.stat().st_size for path in tmp_path.rglob("*/*.*") if "another" not in str(path))
            assert taken <= cap, life
        log.close()

    kept, lost = [], Counter()
    for life in range(12):
        numbers, losses = kept_and_lost(tmp_path / "job" / str(life))
        kept += numbers
        lost += losses
    # The oldest go first, whichever life they are of. What is told of in a log that goes later is told no more.
    assert kept == list(range(total - len(kept), total))
    assert lost["log cap, before the group was made anew"] > 0
    assert kept_and_lost(tmp_path / "job" / "another process")[0] == [0]


def test_a_forked_child_has_left_nothing_behind(tmp_path):
    left = LeftBehind()
    left.of(str(tmp_path), 0).segments.append("the parent's")
    assert left.of(str(tmp_path), 1).segments == deque()
    assert left.of(f"{tmp_path}/.", 0).segments == deque(["the parent's"])
    child = os.fork()
    if not child:
        os._exit(len(left.of(str(tmp_path), 0).segments))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_losses_told_in_a_segment_that_goes_are_told_again(tmp_path):
    log = open_log(tmp_path, max_bytes=40_000)
    log.count_lost("queue full", 7)
    total = 0
    while not kept_and_lost(tmp_path)[1]["log cap"]:
        log.write([beat(total + n, pad=os.urandom(50).hex()) for n in range(20)])
        total += 20
    log.close()
    assert not (tmp_path / "rank-00000.jsonl.gz").exists()
    assert kept_and_lost(tmp_path)[1]["queue full"] == 7


def test_a_record_larger_than_a_segment_is_counted_and_the_rest_kept(tmp_path):
    log = open_log(tmp_path, max_bytes=40_000)
    log.write([beat(0), beat(1, pad="x" * 50_000), beat(2)])
    log.close()
    kept, lost = kept_and_lost(tmp_path)
    assert (kept, lost) == ([0, 2], {"record too large": 1})


def test_a_full_disk_costs_records_that_are_counted_and_nothing_else(tiny_disk):
    log = open_log(tiny_disk / "run")
    total = 0

    def write_some():
        nonlocal total
        log.write([beat(total + n, pad="x" * 100) for n in range(50)])
        total += 50

    write_some()
    filler = fill(tiny_disk)
    for _ in range(5):
        write_some()
    filler.unlink()
    write_some()
    log.close()

    kept, lost = kept_and_lost(tiny_disk)
    assert lost["disk"] > 0
    assert len(kept) + lost["disk"] == total
    assert kept[:50] == list(range(50))
    assert kept[-50:] == list(range(total - 50, total))
    _, notes = everything(tiny_disk)
    assert [note for note in notes if "1 damaged line in run/rank-00000.jsonl" in note]  # the write the disk cut off


def test_a_disk_full_from_the_start_gets_its_identity_line_later(tiny_disk):
    filler = fill(tiny_disk)
    log = open_log(tiny_disk / "run")
    with pytest.raises(LogUnusable, match="No space left"):
        log.open()
    log.write([beat(0)])
    filler.unlink()
    log.write([beat(1)])
    log.close()

    assert kept_and_lost(tiny_disk) == ([1], {"disk": 1})
    assert scan(str(tiny_disk)).logs[0].identity["rank"] == 0


def test_rotation_survives_a_disk_too_full_to_compress(tiny_disk):
    filler = tiny_disk / "filler"
    filler.write_bytes(b"x" * 24_000)
    log = open_log(tiny_disk / "run", max_bytes=200_000, segment_bytes=8_000)
    total = 0
    for batch in range(30):  # twice what fits, so new segments and their compression fail at some point
        log.write([beat(total + n, pad=os.urandom(40).hex()) for n in range(20)])
        total += 20
        if batch == 28:
            filler.unlink()
    log.close()
    kept, lost = kept_and_lost(tiny_disk)
    assert lost["disk"] > 0
    assert len(kept) + lost["disk"] == total
    assert not list(tiny_disk.rglob("*.tmp"))


def test_a_directory_that_vanishes_is_made_again(tmp_path):
    log = open_log(tmp_path / "job" / "run")
    log.write([beat(0)])
    shutil.rmtree(tmp_path / "job")
    log.write([beat(1)])
    log.close()
    assert kept_and_lost(tmp_path) == ([1], {})
    assert scan(str(tmp_path)).logs[0].identity["segment"] == 1


def test_while_the_directory_cannot_be_made_records_are_counted(tmp_path):
    place = tmp_path / "run"
    log = open_log(place / "inner")
    place.write_text("a file in the way")
    log.write([beat(0), beat(1)])
    log.write([beat(2)])
    place.unlink()
    log.write([beat(3)])
    log.close()
    assert kept_and_lost(place) == ([3], {"disk": 3})


def test_a_descriptor_closed_by_user_code_never_writes_into_anothers_file(tmp_path):
    log = open_log(tmp_path / "run")
    log.write([beat(0)])
    ours = next(
        int(link.name)
        for link in Path("/proc/self/fd").iterdir()
        if os.path.realpath(link) == os.path.realpath(log.path)
    )
    victim = tmp_path / "victim"
    with open(victim, "w") as theirs:
        os.dup2(theirs.fileno(), ours)  # what a close and an open by somebody else come to
        log.write([beat(1)])
        log.close()
        os.close(ours)
    assert victim.read_text() == ""
    assert kept_and_lost(tmp_path / "run") == ([0, 1], {})


def test_two_processes_of_one_rank_never_share_a_file(tmp_path):
    code = """
        import os, sys
        from ddtrace_pytorch.runlog.writer import RunLogFile
        log = RunLogFile(sys.argv[1], 0, lambda: {"ts": 1, "rank": 0, "pid": os.getpid()}, 40_000)
        for batch in range(100):
            log.write([{"type": "beat", "ts": 1, "seq": batch * 10 + n, "pid": os.getpid()} for n in range(10)])
        log.close()
    """
    processes = [python(code, tmp_path) for _ in range(4)]
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0

    logs = scan(str(tmp_path)).logs
    assert len(logs) == 4
    writers = set()
    for log in logs:
        records = list(read(log))
        pids = {record["pid"] for record in records if record["type"] != "drop"}
        assert len(pids) == 1
        writers |= pids
        lost = sum(record["count"] for record in records if record["type"] == "drop")
        assert sum(record["type"] == "beat" for record in records) + lost == 1000
        assert log.notes == []
    assert writers == {process.pid for process in processes}


def test_a_segment_that_another_process_has_compressed_is_that_ones(tmp_path, monkeypatch):
    first = open_log(tmp_path, max_bytes=40_000)
    for number in range(200):
        first.write([beat(number)])
    (compressed,) = tmp_path.glob("rank-00000.jsonl.gz")
    before = compressed.read_bytes()

    # A list of the directory that was made while it was compressed.
    lists = [os.listdir, lambda path: []]
    monkeypatch.setattr(os, "listdir", lambda path: lists.pop()(path))
    second = open_log(tmp_path, max_bytes=40_000)
    for number in range(200):
        second.write([beat(1000 + number)])
    assert compressed.read_bytes() == before
    assert os.path.basename(second.path).startswith("rank-00000.1.")
    second.close()
    first.close()


def test_a_name_taken_at_the_last_moment_is_left_to_whoever_took_it(tmp_path):
    code = """
        import os, sys
        from ddtrace_pytorch.runlog.writer import RunLogFile
        taken = os.path.join(sys.argv[1], "rank-00000.jsonl")
        def be_quicker(event, args):
            if event == "open" and args[0] == taken and not os.path.exists(taken):
                os.mkfifo(taken)
        sys.addaudithook(be_quicker)
        log = RunLogFile(sys.argv[1], 0, lambda: {"ts": 1, "rank": 0}, 40_000)
        log.write([{"type": "beat", "ts": 1, "seq": 0}])
        print(os.path.basename(log.path))
    """
    out, _ = python(code, tmp_path).communicate(timeout=20)
    assert out == "rank-00000.1.jsonl\n"
    assert kept_and_lost(tmp_path) == ([0], {})


def test_attempts_leave_each_others_bytes_alone(tmp_path):
    before = {}
    for incarnation in ("first", "second"):
        log = open_log(log_directory(str(tmp_path), "4242", incarnation))
        log.write([beat(0)])
        log.close()
        if incarnation == "first":
            before = {path: path.read_bytes() for path in tmp_path.rglob("*.jsonl")}
    assert len(before) == 1
    assert all(path.read_bytes() == data for path, data in before.items())
    assert len(scan(str(tmp_path)).logs) == 2


def test_sixty_four_processes_make_few_system_calls_each(tmp_path):
    code = """
        import json, os, sys
        from ddtrace_pytorch.runlog.writer import RunLogFile, RunLogWriter
        def run(rank):
            opened = []
            sys.addaudithook(lambda event, args: event in ("open", "os.listdir", "os.mkdir") and opened.append(event))
            looked = {name: 0 for name in ("stat", "lstat", "fstat", "fsync", "fdatasync", "sync")}
            def counting(name, function):
                def call(*args, **more):
                    looked[name] += 1
                    return function(*args, **more)
                return call
            for name in looked:
                setattr(os, name, counting(name, getattr(os, name)))
            log = RunLogWriter(RunLogFile(sys.argv[1], rank, lambda: {"ts": 1, "rank": rank}, 2**20))
            fields = lambda: dict(line.split(": ") for line in os.read(io, 4096).decode().splitlines())
            io = os.open("/proc/self/io", os.O_RDONLY)
            before = fields()
            os.lseek(io, 0, 0)
            opened.clear()
            looked |= dict.fromkeys(looked, 0)
            for beat in range(10):
                for n in range(100):
                    log.queue.put({"type": "event", "ts": 1, "seq": beat * 100 + n})
                log.flush()
            log.close()
            after = fields()
            synced = sum(looked.pop(name) for name in ("fsync", "fdatasync", "sync"))
            told = [rank, len(opened), int(after["syscw"]) - int(before["syscw"]), sum(looked.values()), synced]
            os.write(1, (json.dumps(told) + "\\n").encode())
        children = []
        for rank in range(64):
            pid = os.fork()
            if not pid:
                run(rank)
                os._exit(0)
            children.append(pid)
        sys.exit(any(os.waitpid(pid, 0)[1] for pid in children))
    """
    process = python(code, tmp_path)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0
    counts = [json.loads(line) for line in out.splitlines()]
    assert sorted(rank for rank, *_ in counts) == list(range(64))
    assert max(opens for _, opens, *_ in counts) <= 4
    assert {writes for _, _, writes, *_ in counts} == {10}
    assert max(stats for *_, stats, _ in counts) <= 2 * 10 + 4
    assert {synced for *_, synced in counts} == {0}
    found = scan(str(tmp_path))
    assert [log.rank for log in found.logs] == list(range(64))
    assert {sum(record["type"] == "event" for record in read(log)) for log in found.logs} == {1000}


def test_a_blocked_writer_blocks_nobody_else_and_counts_what_it_missed(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def stuck():
        with open(fifo, "rb") as file:  # opens once somebody writes
            file.read()
        return identity()

    log = RunLogWriter(RunLogFile(str(tmp_path / "run"), 0, stuck, MIB), RunLogQueue(limit_records=1000))
    log.queue.put(beat(0))
    thread = threading.Thread(target=log.flush)
    thread.start()
    wait_for(lambda: log.file.path is not None or (tmp_path / "run" / "rank-00000.jsonl").exists())

    for seq in range(1, 50_001):
        log.queue.put(beat(seq))
    assert thread.is_alive()
    assert (tmp_path / "run" / "rank-00000.jsonl").stat().st_size == 0

    fifo.write_bytes(b"go on")
    thread.join(20)
    assert not thread.is_alive()
    log.close()
    kept, lost = kept_and_lost(tmp_path / "run")
    assert kept == list(range(1001))
    assert lost == {"queue full": 49_000}


def test_what_others_count_as_dropped_is_told_whatever_becomes_of_the_queue_and_the_disk(tmp_path):
    log = RunLogWriter(RunLogFile(str(tmp_path), 0, identity, MIB), RunLogQueue(limit_records=2))
    for seq in range(5):
        log.queue.put(beat(seq))
    for _ in range(1_000):  # the writer is held up
        log.queue.count_lost("user records", 3)
    assert len(log.queue._drops) < 100
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        log.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    log.queue.count_lost("user records", 7)
    log.close()
    kept, lost = kept_and_lost(tmp_path)
    assert kept == []
    assert lost == {"disk": 2, "queue full": 3, "user records": 3_007}


def test_a_fifo_where_the_file_should_be_is_stepped_around(tmp_path):
    os.mkfifo(tmp_path / "rank-00000.jsonl")
    log = open_log(tmp_path)
    log.write([beat(0)])
    log.close()
    records, notes = everything(tmp_path)
    assert [record["type"] for record in records] == ["identity", "beat"]
    assert notes == ["skipped 1 file that is no run log (rank-00000.jsonl)"]


def test_a_forked_child_never_touches_the_parents_file(tmp_path):
    log = RunLogWriter(open_log(tmp_path))
    stop = threading.Event()

    def keep_writing():
        seq = 0
        while not stop.is_set():
            log.queue.put(beat(seq))
            log.flush()
            seq += 1

    thread = threading.Thread(target=keep_writing)
    thread.start()
    try:
        for _ in range(50):
            pid = os.fork()
            if not pid:
                log.queue.put({"type": "event", "ts": NOW, "name": "from the child"})
                log.flush()
                log.close()
                os._exit(0)
            ended: list[int] = []
            wait_for(
                lambda pid=pid, ended=ended: ended or ended.extend(p for p in [os.waitpid(pid, os.WNOHANG)[0]] if p)
            )
    finally:
        stop.set()
        thread.join()
    log.close()
    records, notes = everything(tmp_path)
    assert {record["type"] for record in records} <= {"identity", "beat", "drop"}
    assert notes == []
    seqs = [record["seq"] for record in records if record["type"] == "beat"]
    assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))


def test_what_was_flushed_survives_sigkill(tmp_path):
    code = """
        import itertools, sys
        from ddtrace_pytorch.runlog.writer import RunLogFile
        log = RunLogFile(sys.argv[1], 0, lambda: {"ts": 1, "rank": 0}, 2**20)
        for seq in itertools.count():
            log.write([{"type": "beat", "ts": 1, "seq": seq}])
            print(seq, flush=True)
    """
    process = python(code, tmp_path)
    said = 0
    while said < 100:
        said = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    rest, _ = process.communicate(timeout=20)
    said = max([said, *map(int, rest.split())])
    kept, _ = kept_and_lost(tmp_path)
    assert kept[: said + 1] == list(range(said + 1))


# ---- a directory in a shared place ----


def test_a_shared_root_is_made_private(tmp_path):
    root = tmp_path / "root"
    writer.private_root(str(root))
    writer.private_root(str(root))
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


@pytest.mark.parametrize("trap", ["symlink", "dangling symlink", "file", "other user", "writable by all"])
def test_a_root_somebody_else_may_have_planted_is_refused(tmp_path, trap):
    root = tmp_path / "root"
    elsewhere = tmp_path / "elsewhere"
    if trap == "symlink":
        elsewhere.mkdir()
        root.symlink_to(elsewhere)
    elif trap == "dangling symlink":
        root.symlink_to(elsewhere)
    elif trap == "file":
        root.write_text("")
    else:
        root.mkdir()
        if trap == "other user":
            os.chown(root, 12345, 12345)
        else:
            root.chmod(0o777)
    log = open_log(root / "job" / "run", guarded=str(root))

    with pytest.raises(LogUnusable, match="DD_PYTORCH_LOG_DIR"):
        log.open()
    log.write([beat(0)])

    assert not elsewhere.exists() or list(elsewhere.iterdir()) == []
    assert not root.is_dir() or list(root.iterdir()) == []


def test_an_unusable_directory_says_why(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LogUnusable, match="Not a directory") as caught:
        open_log(tmp_path / "file" / "run").open()
    assert caught.value.__cause__.errno == errno.ENOTDIR


# ---- reader ----


def write_lines(path, records, tail=b""):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = b"".join(map(schema.encode, records)) + tail
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return data


def a_rank(path, rank=0, beats=3, tail=b"", **more):
    first = {"type": "identity", **identity(rank, **more)}
    return write_lines(path, [first, *map(beat, range(beats))], tail)


def test_a_line_cut_short_costs_that_line(tmp_path):
    a_rank(tmp_path / "j" / "i" / "rank-00000.jsonl", tail=b'{"type":"beat","ts":17')
    records, notes = everything(tmp_path)
    assert len(records) == 4
    assert notes == ["skipped the last line of i/rank-00000.jsonl, which is cut short"]


def test_a_last_line_without_its_end_that_is_whole_counts(tmp_path):
    a_rank(tmp_path / "rank-00000.jsonl", tail=schema.encode(beat(3)).rstrip())
    records, notes = everything(tmp_path)
    assert len(records) == 5
    assert notes == []


def test_damaged_lines_are_skipped_and_counted(tmp_path):
    tail = b"\x00" * 5000 + b"\n{]\n" + b"x" * (reader.MAX_LINE + 5000) + b"\n" + schema.encode(beat(9))
    a_rank(tmp_path / "j" / "i" / "rank-00000.jsonl", tail=tail)
    records, notes = everything(tmp_path)
    assert [record.get("seq") for record in records] == [None, 0, 1, 2, 9]
    assert notes == ["skipped 3 damaged lines in i/rank-00000.jsonl"]


@pytest.mark.parametrize("keep", [0, 5, 30, 400])
def test_a_compressed_segment_cut_short_gives_what_is_before_the_cut(tmp_path, keep):
    path = tmp_path / "j" / "i" / "rank-00000.jsonl.gz"
    write_lines(path, [{"type": "identity", **identity()}, *(beat(n, pad=os.urandom(20).hex()) for n in range(1000))])
    path.write_bytes(path.read_bytes()[:keep] if keep < 400 else path.read_bytes()[:-100])
    a_rank(path.parent / "rank-00000.seg-00001.jsonl", beats=2)
    records, notes = everything(tmp_path)
    assert len([note for note in notes if "i/rank-00000.jsonl.gz is" in note]) == 1
    assert len(records) > 900 if keep == 400 else len(records) == 3


@settings(max_examples=60)
@given(st.binary(max_size=300), st.sampled_from(["", ".gz"]), st.booleans())
def test_any_file_content_can_be_read_without_an_error(data, suffix, packed):
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / f"rank-00000.jsonl{suffix}"
        path.write_bytes(gzip.compress(data) if packed else data)
        for log in scan(place).logs:
            list(read(log))


def test_empty_files_foreign_files_and_links_are_named(tmp_path):
    run = tmp_path / "in" / "j" / "i"
    a_rank(run / "rank-00000.jsonl")
    (run / "rank-00001.jsonl").touch()
    (run / "notes.txt").write_text("hello")
    (run / "rank-00000.jsonl.gz.tmp").write_bytes(b"\x1f")
    a_rank(tmp_path / "outside" / "rank-00007.jsonl", rank=7)
    (run / "rank-00007.jsonl").symlink_to(tmp_path / "outside" / "rank-00007.jsonl")
    (run / "more").symlink_to(tmp_path / "outside")

    found = scan(str(tmp_path / "in"))

    assert [(log.rank, log.damaged) for log in found.logs if log.job == "4242"] == [(0, False)]
    assert [(log.rank, log.damaged, log.notes) for log in found.logs if log.job != "4242"] == [
        (1, True, ["i/rank-00001.jsonl is empty"])
    ]
    assert sorted(found.notes) == [
        "skipped 1 file that is no run log (notes.txt)",
        "skipped 2 symbolic links (more, rank-00007.jsonl)",
    ]


def test_links_and_fifos_are_not_opened_even_when_asked_for(tmp_path):
    a_rank(tmp_path / "rank-00000.jsonl")
    (tmp_path / "link").symlink_to("rank-00000.jsonl")
    os.mkfifo(tmp_path / "fifo")
    for name, note in (("link", "could not be read"), ("fifo", "is empty")):
        notes: list[str] = []
        assert list(read_file(str(tmp_path / name), notes)) == []
        assert len(notes) == 1
        assert note in notes[0]


def test_the_same_rank_from_two_hosts_stays_two_logs(tmp_path):
    for host in ("host-a", "host-b"):
        a_rank(tmp_path / host / "4242" / "aaa" / "rank-00000.jsonl", host=host)
    found = scan(str(tmp_path))
    assert [(log.rank, log.host) for log in found.logs] == [(0, "host-a"), (0, "host-b")]
    assert found.notes == ["rank 0 of 4242 (aaa) was written by 2 processes: host-a, host-b"]


def test_a_file_of_another_run_is_told_apart_by_what_it_says(tmp_path):
    a_rank(tmp_path / "4242" / "aaa" / "rank-00000.jsonl")
    a_rank(tmp_path / "4242" / "aaa" / "rank-00001.jsonl", rank=1, job="other", incarnation="zzz")
    assert [(log.job, log.incarnation, log.rank) for log in scan(str(tmp_path)).logs] == [
        ("4242", "aaa", 0),
        ("other", "zzz", 1),
    ]


@pytest.mark.parametrize("start", ["", "4242", "4242/aaa"])
def test_root_job_and_run_can_each_be_scanned(tmp_path, start):
    a_rank(tmp_path / "4242" / "aaa" / "rank-00000.jsonl")
    (log,) = scan(str(tmp_path / start)).logs
    assert (log.job, log.incarnation, log.rank) == ("4242", "aaa", 0)


def test_a_newer_schema_is_read_as_far_as_known_and_said(tmp_path):
    path = tmp_path / "rank-00000.jsonl"
    a_rank(path, schema=9, tail=b'{"type":"hologram","ts":5,"x":[1]}\n')
    records, notes = everything(tmp_path)
    assert records[-1]["type"] == "hologram"
    assert len(notes) == 1
    assert "schema 9, newer than the 1" in notes[0]


def test_without_an_identity_line_the_place_says_whose_it_is(tmp_path):
    write_lines(tmp_path / "4242" / "aaa" / "rank-00005.jsonl", [beat(0)])
    (log,) = scan(str(tmp_path)).logs
    assert (log.job, log.incarnation, log.rank, log.damaged) == ("4242", "aaa", 5, False)
    assert "no identity line" in log.notes[0]


def test_a_segment_there_both_plain_and_compressed_is_read_once(tmp_path):
    data = a_rank(tmp_path / "rank-00000.jsonl")
    (tmp_path / "rank-00000.jsonl.gz").write_bytes(gzip.compress(data))
    records, notes = everything(tmp_path)
    assert len(records) == 4
    assert notes == ["rank-00000.jsonl is there twice, plain and compressed; read once"]


def test_asking_for_some_types_gives_what_filtering_gives(tmp_path):
    a_rank(tmp_path / "rank-00000.jsonl", tail=b'{"ts":5,"type":"drop","count":1}\n{"type":"event","ts":1}\n')
    (log,) = scan(str(tmp_path)).logs
    assert list(read(log, {"beat", "drop"})) == [r for r in read(log) if r["type"] in ("beat", "drop")]
    assert len(list(read(log, {"beat", "drop"}))) == 4


def test_a_line_is_parsed_if_whoever_sifts_them_says_so(tmp_path):
    path = tmp_path / "rank-00000.jsonl"
    records = [{"type": "beat", "ts": NOW, "seq": seq} for seq in range(3)] + [
        {"type": "event", "ts": NOW, "name": "x"}
    ]
    path.write_bytes(b"".join(map(schema.encode, records)) + b'{"type":"beat","ts":1')
    seen, notes = [], []

    def not_the_second(lines):
        seen.extend(lines)
        return [line for line in lines if b'"seq":1' not in line]

    assert list(read_file(str(path), notes, None, not_the_second)) == [records[0], records[2], records[3]]
    assert list(read_file(str(path), [], ["event"], not_the_second)) == [records[3]]
    assert seen == [schema.encode(one).rstrip() for one in (*records, records[3])]
    assert notes == [f"skipped the last line of {tmp_path.name}/rank-00000.jsonl, which is cut short"]


def test_lines_are_found_wherever_blocks_end(tmp_path, monkeypatch):
    data = a_rank(tmp_path / "rank-00000.jsonl", beats=20)
    for size in (1, 7, 64, len(data)):
        monkeypatch.setattr(reader, "BLOCK", size)
        monkeypatch.setattr(reader, "FIRST_BLOCK", size)
        records, notes = everything(tmp_path)
        assert b"".join(map(schema.encode, records)) == data
        assert notes == []


def test_any_value_becomes_text_that_is_json():
    half = "\ud800é😀"
    for value, text in [
        (math.nan, '"NaN"'),
        ({1: [math.inf]}, '{"1":["Infinity"]}'),
        (half, '"\\\\ud800é😀"'),
        ({half: "é\x1b"}, '{"\\\\ud800é😀":"é\\u001b"}'),
        ({"é": object()}, '{"é":"object"}'),
    ]:
        assert schema.json_text(value) == text
