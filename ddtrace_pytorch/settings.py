"""Every environment variable this package reads, in one table.

A bad value never stops a job: the default is used and :func:`load` says so once, naming the variable, what it
got and what it accepts. A variable with our prefix that is not in the table is most likely misspelt; that too is said,
and so is what looks like a misspelt switch of ddtrace's.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

PREFIX = "DD_PYTORCH_"
# What a shell can set; anything else with our prefix is nobody's slip of the pen.
_OURS = re.compile(PREFIX + r"\w*", re.ASCII)

# By what ddtrace is asked to switch us on; each alone will do.
SWITCHES = ("DD_PATCH_MODULES", "DD_TRACE_PYTORCH_ENABLED")
# Worth comparing with them; ddtrace's DD_TRACE_PYTEST_ENABLED is nearer than many a slip.
_LIKE_SWITCHES = re.compile(r"DD_P\w*MOD\w*|DD_TRAC\w*(?:TOR|CH|PYTO)\w*", re.ASCII)


class BadValue(ValueError):
    """A setting's text cannot be read; the message says what is accepted. Where only a part is `bad`, the others
    came to what is `kept`."""

    def __init__(self, accepted: str, bad: str | None = None, kept: object = None) -> None:
        super().__init__(accepted)
        self.bad = bad
        self.kept = kept


def _text(raw: str) -> str:
    return raw.strip()


def _optional_text(raw: str) -> str | None:
    return raw.strip() or None


def _optional_path(raw: str) -> str | None:
    # No shell expands the tilde in a container's or a YAML file's environment.
    return os.path.expanduser(raw.strip()) or None


def _as_ddtrace(raw: str) -> bool:
    """ddtrace's reading of its own switches: anything but these two words is false."""
    return raw.strip().lower() in ("true", "1")


def _number(low: float, high: float, or_zero: bool = False) -> Callable[[str], float]:
    def parse(raw: str) -> float:
        accepted = f"{'0 or ' if or_zero else ''}a number from {low:.10g} to {high:.10g}"
        try:
            value = float(raw)
        except ValueError:
            raise BadValue(accepted) from None
        if or_zero and value == 0:
            return value
        if not low <= value <= high:  # also refuses NaN, which compares false with everything
            raise BadValue(accepted)
        return value

    return parse


def _switch(raw: str) -> bool:
    word = raw.strip().lower()
    if word not in ("true", "1", "false", "0"):
        raise BadValue("true or false")
    return word in ("true", "1")


def _paths(raw: str) -> tuple[str, ...]:
    return tuple(path for path in map(str.strip, raw.split(",")) if path)


def _pairs(raw: str) -> tuple[tuple[str, str], ...]:
    pairs, bad = [], []
    for part in filter(str.strip, raw.split(",")):
        key, colon, value = map(str.strip, part.partition(":"))
        if key and colon and value:
            pairs.append((key, value))
        else:
            bad.append(part)
    if bad:
        raise BadValue("pairs such as team:vision,run:7", ",".join(bad), tuple(pairs))
    return tuple(pairs)


def _whole(low: int, high: int) -> Callable[[str], int]:
    def parse(raw: str) -> int:
        accepted = f"a whole number from {low} to {high}"
        try:
            value = int(raw)
        except ValueError:
            raise BadValue(accepted) from None
        if not low <= value <= high:
            raise BadValue(accepted)
        return value

    return parse


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(raw: str) -> str:
        word = raw.strip().lower()
        if word not in words:
            raise BadValue("one of " + ", ".join(words))
        return word

    return parse


def _where(raw: str) -> str | None:
    """Which calls a switch that may be narrowed to those between nodes is on for; None where nobody said."""
    word = raw.strip().lower()
    if not word:
        return None
    meant = {"1": "true", "0": "false"}.get(word, word)
    if meant not in ("true", "false", "crossnode"):
        raise BadValue("true, false or crossnode")
    return meant


def _traced(raw: str) -> str | None:
    """monitor_collectives' word for the same; it took any word but the other two for ALL, and its users write 1."""
    word = raw.strip().lower()
    if not word:
        return None
    if word not in ("all", "1", "crossnode", "none"):
        raise BadValue("ALL, CROSSNODE or NONE")
    return {"crossnode": "crossnode", "none": "false"}.get(word, "true")


def _as_monitor_collectives(raw: str) -> bool:
    return raw.strip().lower() in ("true", "1", "t", "y", "yes")


@dataclass(frozen=True)
class RankChoice:
    """Which ranks are chosen: ``all``, numbers and ranges (``0,8-15``), or every n-th (``%8``)."""

    text: str
    ranges: tuple[range, ...] = ()
    every: int = 0

    def __contains__(self, rank: int) -> bool:
        if self.every:
            return rank % self.every == 0
        return not self.ranges or any(rank in numbers for numbers in self.ranges)

    @property
    def first(self) -> int:
        """The lowest of them: the one that speaks for all."""
        return min((numbers.start for numbers in self.ranges), default=0)


def rank_choice(raw: str) -> RankChoice:
    """The ranks that the text of DD_PYTORCH_LOG_RANKS, or its like, chooses; :class:`BadValue` if it can't be read."""
    text = raw.strip().lower()
    if text == "all":
        return RankChoice(text)
    try:
        if text.startswith("%"):
            every = int(text[1:])
            if every < 1:
                raise ValueError
            return RankChoice(text, every=every)
        ranges = []
        for part in text.split(","):
            first, dash, last = part.strip().partition("-")
            numbers = range(int(first), int(last if dash else first) + 1)
            if not numbers:
                raise ValueError
            ranges.append(numbers)
        return RankChoice(text, tuple(ranges))
    except ValueError:
        raise BadValue("all, numbers and ranges such as 0,8-15, or every n-th such as %8") from None


# What the readers that take any text make of it.
_TAKES_ANYTHING: dict[Callable[[str], Any], str] = {
    _text: "any text",
    _optional_text: "any text",
    _optional_path: "a path; ~ is the home directory",
    _paths: "paths of factories, with commas",
    _as_ddtrace: "true or 1; anything else is false",
    _as_monitor_collectives: "true, 1, t, y or yes; anything else is false",
}


@dataclass(frozen=True)
class Setting:
    """One row: the variable, the field of :class:`Settings` it fills, how it is read, and what it means.

    Without a field, it is read elsewhere and only declared here.
    """

    variable: str
    field: str | None
    parse: Callable[[str], Any]
    default: str
    meaning: str

    @property
    def accepted(self) -> str:
        """What it takes, in words: those of the complaint about what it doesn't take, if there is any such thing."""
        try:
            self.parse("\0")
        except BadValue as accepted:
            return str(accepted)
        return _TAKES_ANYTHING[self.parse]


TABLE: tuple[Setting, ...] = (
    Setting(
        "DD_PYTORCH_JOB_ID",
        None,  # read with the launchers' ids, by ddtrace_pytorch.identity.job
        _optional_text,
        "",
        "The id of the training job; wins over every id the launcher gives.",
    ),
    Setting(
        "DD_PYTORCH_SERVICE",
        "own_service",
        _optional_text,
        "",
        "Service of our spans; otherwise DD_SERVICE, otherwise `pytorch`.",
    ),
    Setting("DD_SERVICE", "dd_service", _optional_text, "", "ddtrace's own service name, used when ours is not set."),
    Setting(
        "DD_TRACE_ENABLED",
        "trace_enabled",
        _as_ddtrace,
        "true",
        "ddtrace's own switch; anything but `true` and `1` also turns us off.",
    ),
    Setting(
        "DD_PYTORCH_EXPORT",
        "export",
        _one_of("auto", "agent", "local", "both", "none"),
        "auto",
        "Where records go: `auto` (the Agent if it answers, else the run log), `agent`, `local`, `both` or `none`.",
    ),
    Setting(
        "DD_PYTORCH_ROTATION_SECONDS",
        "rotation_seconds",
        _number(0.01, 86400.0),
        "600",
        "Length of one piece of the rank span, in seconds.",
    ),
    Setting(
        "DD_PYTORCH_SNAPSHOT_SECONDS",
        "snapshot_seconds",
        _number(0.1, 86400.0),
        "60",
        "How often an open rank span is sent again, in seconds; the first time after 10 s or this, whichever is less.",
    ),
    Setting(
        "DD_PYTORCH_COLLECTIVES",
        "collectives",
        _one_of("summary", "crossnode", "all", "off"),
        "summary",
        "Collectives: `summary` (totals), `crossnode` (and each call between nodes), `all` (and each call) or `off`.",
    ),
    Setting(
        "DD_PYTORCH_SUMMARY_SECONDS",
        "summary_seconds",
        _number(0.1, 86400.0),
        "60",
        "How often totals are told (of collectives, steps, records of your own), in seconds.",
    ),
    Setting(
        "DD_PYTORCH_SLOW_MS",
        "slow_ms",
        _number(0.0, 86_400_000.0),
        "1000",
        "A collective slower than this, and than eight times its operation's p99, is told of by itself; in ms.",
    ),
    Setting(
        "DD_PYTORCH_INSTRUMENT",
        "instrument",
        _one_of("auto", "in_place", "python", "wrapt", "hooks"),
        "auto",
        "How collectives are seen: `in_place`, `python` (that without its part in C), `wrapt`, `hooks` (from torch "
        "2.14 on), or `auto`, the best there is.",
    ),
    Setting(
        "DD_PYTORCH_STEP_SAMPLE",
        "step_sample",
        _whole(0, 10**9),
        "100",
        "One training step in so many gets a span of its own, and each that takes 3 times the median; 0: only these.",
    ),
    Setting(
        "DD_TRAINING_STEP_PROFILING",
        "step_profiling",
        _as_ddtrace,
        "false",
        "`true`: Datadog's native GPU tracer, if it is there, is told where each step begins and ends.",
    ),
    Setting(
        "DD_PYTORCH_STALL_SECONDS",
        "stall_seconds",
        _number(1.0, 86400.0, or_zero=True),  # states are as old as a beat
        "10",
        "A collective that takes longer than this, and than eight times its operation's p99, stalls: all ranks are "
        "asked where they are, and one says who is waited for; 0: never.",
    ),
    Setting(
        "DD_PYTORCH_NVTX",
        "nvtx",
        _where,
        "",
        "NVTX range around each collective, for Nsight: `true`, `false` (the default) or `crossnode`.",
    ),
    Setting(
        "DD_PYTORCH_PRINT",
        "print_calls",
        _where,
        "",
        "A line on stdout for each collective, from its leader: `true`, `false` (the default) or `crossnode`.",
    ),
    Setting(
        "TORCH_DISTRIBUTED_TRACING",
        "tracing",
        _traced,
        "",
        "As for Google's monitor_collectives: NVTX ranges with its keys, for `ALL` or `CROSSNODE` calls, or `NONE`.",
    ),
    Setting(
        "TORCH_DISTRIBUTED_TRACING_PRINT",
        "tracing_print",
        _as_monitor_collectives,
        "false",
        "As there: print them too. Only with `TORCH_DISTRIBUTED_TRACING`.",
    ),
    Setting("GPU_SERIAL", "gpu_serial", _text, "unknown", "As there: what its records give as `gpu_serial`."),
    Setting("VM_ID", "vm_id", _text, "unknown", "As there: what its records give as `vm_id`."),
    Setting(
        "DD_PYTORCH_LOG_DIR",
        "log_dir",
        _optional_path,
        "",
        "Directory of the run log; setting it also makes `auto` write the run log beside an answering Agent.",
    ),
    Setting(
        "DD_PYTORCH_LOG_MAX_MB",
        "log_max_mb",
        _number(1.0, 1_048_576.0),
        "256",
        "Cap of one rank's run log on disk, in MiB; the oldest segments go first.",
    ),
    Setting(
        "DD_PYTORCH_LOG_RANKS",
        "log_ranks",
        rank_choice,
        "all",
        "Ranks that write a run log: `all`, `0,8-15` or `%8` (every eighth).",
    ),
    Setting(
        "DD_PYTORCH_LOG_HANDLERS",
        "log_handlers",
        _paths,
        "",
        "Factories of your own functions that get each record of the run log: `package.module:factory`, with commas.",
    ),
    Setting(
        "DD_PYTORCH_LOG_METADATA",
        "log_metadata",
        _pairs,
        "",
        "More of your own to know each rank by: `key:value` pairs, with commas.",
    ),
    Setting(
        "DD_PYTORCH_RECORDS",
        "records",
        _switch,
        "true",
        "`false`: spans, events and scalars of your own are not recorded.",
    ),
    Setting(
        "DD_PYTORCH_SOURCE",
        "source",
        _text,
        "trainer",
        "The role of this process, such as `trainer`, `rollout` or `reward`.",
    ),
    Setting(
        "DD_PYTORCH_KERNEL_EVERY",
        "kernel_every",
        _whole(0, 10**9),
        "0",
        "On a GPU, the kernels of one step in so many are counted; 0: of none.",
    ),
    Setting(
        "DD_PYTORCH_KERNEL_BUDGET",
        "kernel_budget",
        _number(0.001, 100.0),
        "1",
        "What that may cost, in percent of the time of all steps; beyond that it is done less often.",
    ),
    Setting(
        "DD_PYTORCH_PROFILE_EVERY",
        "profile_every",
        _whole(0, 10**9),
        "0",
        "A window of torch's profiler every so many steps, at the same ones on all ranks; 0: none.",
    ),
    Setting(
        "DD_PYTORCH_PROFILE_WARMUP",
        "profile_warmup",
        _whole(0, 1000),
        "1",
        "Steps before a window in which the profiler is on already, and nothing is kept.",
    ),
    Setting("DD_PYTORCH_PROFILE_ACTIVE", "profile_active", _whole(1, 1000), "2", "Steps that a window takes."),
    Setting(
        "DD_PYTORCH_PROFILE_SLOW",
        "profile_slow",
        _switch,
        "false",
        "`true`: a window also after the first step that takes 5 times the median.",
    ),
    Setting(
        "DD_PYTORCH_PROFILE_RANKS",
        "profile_ranks",
        rank_choice,
        "all",
        "Ranks that have windows: `all`, `0,8-15` or `%8` (every eighth).",
    ),
    Setting(
        "DD_PYTORCH_PROFILE_MAX_MB",
        "profile_max_mb",
        _number(0.001, 1_048_576.0),
        "256",
        "Cap of one rank's traces on disk, in MiB; the oldest go first.",
    ),
    Setting(
        "DD_PYTORCH_PROFILE_WITH",
        "profile_with",
        _one_of("torch", "sampler"),
        "torch",
        "What windows are taken with: `torch`'s profiler, or the kernel `sampler`, where only a GPU's part is wanted.",
    ),
    Setting(
        "DD_PYTORCH_PROFILE_CPU",
        "profile_cpu",
        _switch,
        "false",
        "`true`: windows also record operators on the CPU, as they do where no GPU is used.",
    ),
    Setting(
        "DD_PYTORCH_PROFILE_SHAPES", "profile_shapes", _switch, "false", "`true`: … and the shapes of their inputs."
    ),
    Setting(
        "DD_PYTORCH_PROFILE_STACKS", "profile_stacks", _switch, "false", "`true`: … and where in your code they were."
    ),
    Setting(
        "DD_PYTORCH_PROFILE_MEMORY",
        "profile_memory",
        _switch,
        "false",
        "`true`: windows also record what memory is taken and given back; of a GPU's, there is a snapshot.",
    ),
    Setting(
        "DD_PYTORCH_PROFILE_DIR",
        "profile_dir",
        _optional_path,
        "",
        "Directory of the traces; otherwise beside the run log.",
    ),
    Setting(
        "DD_PYTORCH_STATE_DIR",
        "state_dir",
        _optional_path,
        "",
        "Directory of the ranks' last words, on a disk of this host; otherwise `/dev/shm`, or the temporary directory.",
    ),
)


@dataclass(frozen=True)
class Settings:
    """The settings of one session, read once when it opens."""

    own_service: str | None
    dd_service: str | None
    trace_enabled: bool
    export: str
    rotation_seconds: float
    snapshot_seconds: float
    collectives: str
    summary_seconds: float
    slow_ms: float
    instrument: str
    step_sample: int
    step_profiling: bool
    stall_seconds: float
    nvtx: str | None
    print_calls: str | None
    tracing: str | None
    tracing_print: bool
    gpu_serial: str
    vm_id: str
    log_dir: str | None
    log_max_mb: float
    log_ranks: RankChoice
    log_handlers: tuple[str, ...]
    log_metadata: tuple[tuple[str, str], ...]
    records: bool
    source: str
    kernel_every: int
    kernel_budget: float
    profile_every: int
    profile_warmup: int
    profile_active: int
    profile_slow: bool
    profile_ranks: RankChoice
    profile_max_mb: float
    profile_with: str
    profile_cpu: bool
    profile_shapes: bool
    profile_stacks: bool
    profile_memory: bool
    profile_dir: str | None
    state_dir: str | None
    complaints: tuple[str, ...] = ()

    @property
    def service(self) -> str:
        return self.own_service or self.dd_service or "pytorch"

    @property
    def to_agent(self) -> bool:
        """Whether spans go to the Agent, if one answers."""
        return self.export in ("auto", "agent", "both")

    def to_log(self, agent_answers: bool) -> bool:
        """Whether there is a run log, given that an Agent answers or not."""
        if self.export == "auto":
            return self.log_dir is not None or not agent_answers
        return self.export in ("local", "both")

    @property
    def profile_operators(self) -> tuple[str, ...]:
        """The variables by which windows are to have operators on the CPU."""
        asked = {"CPU": self.profile_cpu, "SHAPES": self.profile_shapes, "STACKS": self.profile_stacks}
        return tuple(f"DD_PYTORCH_PROFILE_{name}" for name, wanted in asked.items() if wanted)

    @property
    def log_root(self) -> str:
        return self.log_dir or default_log_root()

    @property
    def log_root_if_any(self) -> str:
        """Its full path; empty where there is no temporary directory to have it in."""
        try:
            return os.path.abspath(self.log_root)
        except FileNotFoundError:
            return ""


def default_log_root() -> str:
    """Where run logs go when nobody said: a directory of this user's own in the temporary directory."""
    return os.path.join(tempfile.gettempdir(), f"ddtrace-pytorch-{os.getuid()}")


def load(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the table from `environ` (default: the process'); what can't be read or is not in it becomes `complaints`.

    Each complaint begins with the name of its variable.
    """
    source = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    complaints: list[str] = []
    for setting in TABLE:
        if setting.field is None:
            continue
        raw = source.get(setting.variable, "")
        try:
            values[setting.field] = setting.parse(raw if raw.strip() else setting.default)
        except BadValue as accepted:
            values[setting.field] = accepted.kept or setting.parse(setting.default)
            bad = raw if accepted.bad is None else accepted.bad
            used = "the rest" if accepted.kept else repr(setting.default)
            complaints.append(f"{setting.variable}={bad[:80]!r} is not {accepted}; using {used}")
    chosen = Settings(**values)
    return replace(chosen, complaints=(*complaints, *_at_odds(chosen), *_unknown(source)))


def _at_odds(chosen: Settings) -> Iterator[str]:
    """Each of them could be, but not all together."""
    if chosen.profile_every:
        from ddtrace_pytorch.kernels.schedule import Schedule  # every rank reads its settings, and few have windows

        schedule = Schedule(chosen.profile_every, chosen.profile_warmup, chosen.profile_active)
        if schedule.overlaps:
            yield (
                f"DD_PYTORCH_PROFILE_EVERY={schedule.every} is less than a window takes "
                f"({schedule.warmup} + {schedule.active} steps); there are no profiler windows"
            )
    if chosen.profile_with == "sampler" and chosen.profile_operators:
        yield (
            f"DD_PYTORCH_PROFILE_WITH=sampler has no effect: {chosen.profile_operators[0]} asks for what torch's "
            "profiler alone records"
        )


def _unknown(environ: Mapping[str, str]) -> Iterator[str]:
    known = {setting.variable.removeprefix(PREFIX): setting.variable for setting in TABLE}
    for variable in sorted(environ):
        ours = _OURS.fullmatch(variable) is not None
        if not (ours or _LIKE_SWITCHES.fullmatch(variable)) or not environ.get(variable, "").strip():
            continue
        if variable in known.values() or variable in SWITCHES:
            continue
        from difflib import get_close_matches  # only where there is something to guess: every rank reads its settings

        shown = variable[:80]
        near = get_close_matches(shown, SWITCHES, n=1, cutoff=0.85)
        if ours and not near:
            near = [known[name] for name in get_close_matches(shown.removeprefix(PREFIX).upper(), known, n=1)]
        if ours or near:
            what = "is no setting of ddtrace-pytorch" if ours else "switches nothing on"
            yield f"{shown} {what}" + (f"; did you mean {near[0]}?" if near else "")
