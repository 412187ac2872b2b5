"""A user's records in real processes: with a session and before there is one, in workers, in children, to the Agent."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.agent import Agent
from harness.job import DDTRACE_RUN, PYTHON, Jobs, alone, environment, torchrun
from harness.log import Record, of_type, rank_spans, records

import ddtrace_pytorch

pytestmark = pytest.mark.dist

PATCHED = """
import os, sys, threading, time
import torch, torch.distributed as dist
import ddtrace_pytorch
from ddtrace_pytorch import event, scalar, set_step, span, step_tag
ddtrace_pytorch.patch()

def sessions():
    return sum(thread.name == "ddtrace_pytorch.pulse" for thread in threading.enumerate())

def ours():
    return sum(thread.name.startswith("ddtrace_pytorch") for thread in threading.enumerate())
"""


def by_itself(log: Path, **settings: str) -> dict[str, str]:
    """The environment of a process that no launcher started."""
    return environment(None, DD_PYTORCH_EXPORT="local", DD_PYTORCH_LOG_DIR=str(log), **settings)


def run(jobs: Jobs, script: str, env: dict[str, str], *command: str) -> str:
    import textwrap

    return jobs.run([*(command or PYTHON), jobs.script(PATCHED + textwrap.dedent(script))], env).ok().stdout


def names(log: Path) -> list[str]:
    return [record["name"] for record in records(log) if record["type"] in ("event", "user_span")]


def identity(log: Path) -> Record:
    return of_type(log, "identity")[0]


def test_the_first_record_of_a_process_by_itself_opens_a_session(jobs: Jobs, tmp_path: Path) -> None:
    run(
        jobs,
        """
        assert ours() == 0
        with span("work"):
            assert sessions() == 1
            event("now")
        """,
        by_itself(tmp_path / "log", DD_PYTORCH_LOG_METADATA="team:vision, run : a:b "),
    )
    (rank,) = rank_spans(tmp_path / "log")
    assert names(tmp_path / "log") == ["now", "work"]
    assert rank["tags"]["pytorch.source"] == "trainer"
    assert rank["tags"]["pytorch.metadata.team"] == "vision"
    assert rank["tags"]["pytorch.end_reason"] == "exit"
    found = identity(tmp_path / "log")
    assert (found["source"], found["metadata"]) == ("trainer", {"team": "vision", "run": "a:b"})


WITHOUT_TORCH = """
    import sys
    import ddtrace_pytorch
    from ddtrace_pytorch import event, scalar, set_step, span

    set_step(7)
    with span("rollout", prompts=64):
        event("asked")
        scalar({"reward": 0.5})
    assert not {"torch", "ddtrace.contrib.internal.pytorch.patch"} & {*sys.modules}
    if sys.argv[1:] == ["later"]:
        import torch
        from ddtrace_pytorch import instrumentation

        assert instrumentation.is_on()
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(2):
            weight.grad = torch.ones(1)
            optimizer.step()
        scalar({"loss": weight.sum()})
        ddtrace_pytorch.unpatch()
        assert not instrumentation.is_on() and "_datadog_patch" not in vars(torch)
"""


@pytest.mark.parametrize(
    ("later", "settings", "recorded"),
    [
        ("never", {"DD_PATCH_MODULES": "pytorch:true"}, True),
        ("later", {"DD_TRACE_PYTORCH_ENABLED": "true"}, True),
        ("never", {}, False),
    ],
)
def test_a_process_that_has_not_imported_torch_records(
    jobs: Jobs, tmp_path: Path, later: str, settings: dict[str, str], recorded: bool
) -> None:
    log = tmp_path / "log"
    done = jobs.run([*DDTRACE_RUN, *PYTHON, jobs.script(WITHOUT_TORCH), later], by_itself(log, **settings)).ok()
    assert "ddtrace_pytorch" not in done.stderr
    if not recorded:
        assert not log.exists()
        return
    assert names(log) == ["asked", "rollout"]
    assert [one["step"] for one in records(log) if one["type"] in ("event", "user_span")] == [7, 7]
    (rank,) = rank_spans(log)
    assert ("torch.version" in rank["tags"]) is (later == "later")
    first, last = of_type(log, "identity")[0], of_type(log, "identity")[-1]
    assert (first["device"], first["versions"]["torch"]) == (None, "")
    # The last one is over with the process.
    steps = [(one["step"], one.get("first", False)) for one in of_type(log, "step")]
    assert steps == ([(7, True)] if later == "never" else [(7, True), (8, False)])
    if later == "later":
        assert last["device"]["device.kind"] == "cpu"
        assert [one["metrics"] for one in of_type(log, "scalar")] == [{"reward": 0.5}, {"loss": pytest.approx(0.8)}]
        assert rank["tags"]["pytorch.end_reason"] == "unpatched"


def test_records_made_before_the_process_group_are_written_with_their_own_times(jobs: Jobs, tmp_path: Path) -> None:
    run(
        jobs,
        """
        event("before")
        with span("setup"):
            pass
        assert ours() == 0
        made = time.time_ns()
        dist.init_process_group("gloo")
        event("after")
        dist.destroy_process_group()
        event("late")
        print(made)
        """,
        alone(tmp_path / "log"),
    )
    log = tmp_path / "log"
    assert names(log) == ["before", "setup", "after", "late"]
    (rank,) = rank_spans(log)
    before, after, late = of_type(log, "event")
    assert before["ts"] < rank["start"] < after["ts"] < rank["start"] + rank["duration"] < late["ts"]
    assert [record["seq"] for record in (before, after, late)] == [1, 3, 4]
    assert len({record["job"]["incarnation"] for record in of_type(log, "identity")}) == 1


def test_each_rank_has_its_own_records(jobs: Jobs, tmp_path: Path) -> None:
    run(
        jobs,
        """
        dist.init_process_group("gloo")
        for number in range(3):
            scalar({"rank": dist.get_rank(), "number": number}, step=number)
        dist.destroy_process_group()
        """,
        by_itself(tmp_path / "log"),
        *torchrun(2),
    )
    for rank in range(2):
        mine = [one for one in of_type(tmp_path / "log", "scalar") if f"rank-{rank:05d}" in one["_file"]]
        assert [(one["step"], one["metrics"]) for one in mine] == [
            (number, {"rank": rank, "number": number}) for number in range(3)
        ]


@pytest.mark.parametrize(
    ("settings", "script", "rank"),
    [
        # Nobody made a group: told at the end.
        ({"RANK": "3", "WORLD_SIZE": "8"}, "event('x')\nassert ours() == 0", 3),
        ({"RANK": "3", "WORLD_SIZE": "8"}, "event('x')\nddtrace_pytorch.unpatch()", 3),
        # Not at the end only.
        (
            {"RANK": "3", "WORLD_SIZE": "8"},
            "from ddtrace_pytorch.records import before\nbefore.PATIENCE_SECONDS = 0.05\n"
            "while not sessions():\n    event('x')\n    time.sleep(0.01)",
            3,
        ),
        # A role that makes no group.
        (
            {"RANK": "3", "WORLD_SIZE": "8", "DD_PYTORCH_SOURCE": "rollout"},
            "event('x')\nassert sessions() == 1",
            3,
        ),
        ({"DD_PYTORCH_SOURCE": "reward"}, "event('x')\nassert sessions() == 1", 0),
    ],
)
def test_a_process_that_makes_no_group_tells_its_records_too(
    jobs: Jobs, tmp_path: Path, settings: dict[str, str], script: str, rank: int
) -> None:
    run(jobs, script, by_itself(tmp_path / "log", **settings))
    (span,) = rank_spans(tmp_path / "log")
    assert span["metrics"]["rank"] == rank
    assert span["tags"]["pytorch.source"] == settings.get("DD_PYTORCH_SOURCE", "trainer")
    assert identity(tmp_path / "log")["source"] == settings.get("DD_PYTORCH_SOURCE", "trainer")
    assert set(names(tmp_path / "log")) == {"x"}


def test_an_optimizer_step_opens_the_session_that_records_waited_for(jobs: Jobs, tmp_path: Path) -> None:
    run(
        jobs,
        """
        event("before")
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        weight.sum().backward()
        assert ours() == 0
        optimizer.step()
        assert sessions() == 1
        """,
        alone(tmp_path / "log"),
    )
    assert names(tmp_path / "log") == ["before"]


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_the_workers_of_a_data_loader_record_nothing(jobs: Jobs, tmp_path: Path, start: str) -> None:
    script = f"""
        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 8

            def __getitem__(self, index):
                with span("read"):
                    event("item", index=index)
                return index

        if __name__ == "__main__":
            import multiprocessing
            event("first")
            assert sessions() == {int(start == "fork")}
            dist.init_process_group("gloo")
            loader = torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context="{start}")
            assert sum(map(int, loader)) == 28
            dist.destroy_process_group()
        """
    settings = {"DD_PYTORCH_SOURCE": "data"} if start == "fork" else {}
    run(jobs, script, alone(tmp_path / "log", **settings))
    log = tmp_path / "log"
    assert names(log) == ["first"]
    pids = {record["pid"] for record in of_type(log, "identity")}
    assert len(pids) == 1
    ended = [span["tags"]["pytorch.end_reason"] for span in rank_spans(log)]
    assert ended == (["replaced", "destroyed"] if start == "fork" else ["destroyed"])


def test_a_child_forked_from_a_session_records_only_with_a_group_of_its_own(jobs: Jobs, tmp_path: Path) -> None:
    run(
        jobs,
        """
        event("parent")
        assert sessions() == 1
        with span("around"):
            pid = os.fork()
        if not pid:
            event("unheard")
            assert ours() == 0
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            event("child")
            dist.destroy_process_group()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        """,
        by_itself(tmp_path / "log"),
    )
    by_pid: dict[int, list[str]] = {}
    pid_of = {record["_file"]: record["pid"] for record in of_type(tmp_path / "log", "identity")}
    for record in records(tmp_path / "log"):
        if record["type"] in ("event", "user_span"):
            by_pid.setdefault(pid_of[record["_file"]], []).append(record["name"])
    assert sorted(by_pid.values()) == [["child"], ["parent", "around"]]


def test_a_child_forked_before_any_session_tells_its_own_and_not_the_parents(jobs: Jobs, tmp_path: Path) -> None:
    run(
        jobs,
        """
        import multiprocessing
        event("parent")
        def work():
            event("child")
        if __name__ == "__main__":
            process = multiprocessing.get_context("fork").Process(target=work)
            process.start()
            process.join()
            assert process.exitcode == 0
        """,
        alone(tmp_path / "log"),
    )
    assert sorted(names(tmp_path / "log")) == ["child", "parent"]
    assert len({record["pid"] for record in of_type(tmp_path / "log", "identity")}) == 2


@pytest.mark.parametrize(
    "settings", [{"DD_PYTORCH_RECORDS": "false"}, {"DD_PYTORCH_EXPORT": "none"}, {"DD_TRACE_ENABLED": "false"}]
)
def test_records_can_be_switched_off(jobs: Jobs, tmp_path: Path, settings: dict[str, str]) -> None:
    run(
        jobs,
        """
        with span("x"):
            event("x")
            scalar({"x": torch.ones(1)})
        assert ours() == 0
        dist.init_process_group("gloo")
        event("x")
        dist.destroy_process_group()
        """,
        alone(tmp_path / "log") | settings,
    )
    found = records(tmp_path / "log")
    assert not [one for one in found if one["type"] in ("event", "scalar", "user_span")]
    assert bool(found) == (settings == {"DD_PYTORCH_RECORDS": "false"})


def test_spans_reach_the_agent_below_the_rank_span(jobs: Jobs, agent: Agent) -> None:
    run(
        jobs,
        """
        for number in range(3):
            with span("outer", number=number):
                with span("inner"):
                    time.sleep(0.001)
        try:
            with span("fails"):
                raise ValueError("no")
        except ValueError:
            pass
        scalar({"reward": 2.5})
        """,
        environment(agent.url),
    )
    (rank,) = agent.ranks()
    outer, inner, fails = (
        next(one for one in agent.spans("pytorch.span") if one["resource"] == name)
        for name in ("outer", "inner", "fails")
    )
    assert len(agent.spans("pytorch.span")) == 3
    assert outer["parent_id"] == fails["parent_id"] == rank["span_id"]
    assert inner["parent_id"] == outer["span_id"]
    assert {one["trace_id"] for one in (rank, outer, inner, fails)} == {rank["trace_id"]}
    assert rank["start"] <= outer["start"] <= inner["start"]
    assert outer["metrics"]["number"] == 0
    assert fails["error"] == 1
    assert fails["meta"]["error.type"] == "ValueError"
    counts = {one["resource"]: one["metrics"]["span.count"] for one in agent.spans("pytorch.spans")}
    assert counts == {"outer": 3, "inner": 3, "fails": 1}
    (said,) = agent.spans("pytorch.steps")
    assert said["metrics"]["scalar.reward.last"] == 2.5


def test_importing_the_package_imports_nothing_of_it(jobs: Jobs) -> None:
    script = """
        import sys
        before = set(sys.modules)
        import ddtrace_pytorch
        assert set(sys.modules) - before == {
            "ddtrace_pytorch", "ddtrace_pytorch._version", "ddtrace_pytorch.patch"
        } | ({"__future__"} - before), set(sys.modules) - before
        assert ddtrace_pytorch.span.__module__ == "ddtrace_pytorch.api"
        assert "torch" not in sys.modules
        assert "ddtrace" not in sys.modules
        with ddtrace_pytorch.span("nobody hears it"):
            ddtrace_pytorch.scalar({"x": 1})
        try:
            ddtrace_pytorch.nothing
        except AttributeError as error:
            assert str(error) == "module 'ddtrace_pytorch' has no attribute 'nothing'"
    """
    # Without site-packages' own start-up files, one of which imports the package.
    env = environment(None, PYTHONPATH=str(Path(ddtrace_pytorch.__file__).parents[1]))
    jobs.run([*PYTHON, "-S", jobs.script(script)], env).ok()


def test_in_a_training_spans_are_below_their_sampled_step_and_scalars_are_on_it(
    jobs: Jobs, agent: Agent, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    run(
        jobs,
        """
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        with span("all of it"):
            for number in range(1, 7):
                set_step(number)
                with span("step", number=number):
                    with span("forward"):
                        time.sleep(0.002)
                        loss = weight.sum()
                    loss.backward()
                    if number == 3:
                        step_tag("eval")
                        event("best")
                    scalar({"loss": float(number)})
                    optimizer.step()
        """,
        environment(agent.url, DD_PYTORCH_LOG_DIR=str(log), DD_PYTORCH_STEP_SAMPLE="3"),
    )
    steps = {one["metrics"]["step"]: one for one in agent.spans("pytorch.step")}
    sampled = {number: steps[number] for number in (3, 6)}
    assert [one["metrics"]["scalar.loss"] for one in sampled.values()] == [3, 6]
    assert steps[3]["metrics"]["event.best.count"] == 1
    found = agent.spans("pytorch.span")
    for number, step in sampled.items():
        (around,) = [one for one in found if one["metrics"].get("number") == number]
        (forward,) = [one for one in found if one["parent_id"] == around["span_id"]]
        assert (around["resource"], forward["resource"]) == ("step", "forward")
        assert around["parent_id"] == step["span_id"]
        assert around["trace_id"] == forward["trace_id"] == step["trace_id"]
        assert around["metrics"]["step"] == number
    (rank,) = agent.ranks()
    (epoch,) = [one for one in found if one["resource"] == "all of it"]
    assert epoch["parent_id"] == rank["span_id"]
    numbers = [one["metrics"]["number"] for one in found if one["resource"] == "step"]
    assert sorted(numbers) == sorted(steps)
    last = agent.spans("pytorch.steps")[-1]["metrics"]
    assert (last["scalar.loss.min"], last["scalar.loss.max"], last["scalar.loss.last"]) == (1, 6, 6)
    assert [one["step"] for one in of_type(log, "scalar")] == [1, 2, 3, 4, 5, 6]
    assert ["eval" in one["step_tags"] for one in of_type(log, "event")] == [True]
