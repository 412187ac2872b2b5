"""`ddtrace-pytorch doctor`: would a job started from here be traced, and if not, what to do.

:func:`gather` collects :class:`Facts` (the effects), :func:`examine` and :func:`verdict` turn them into :class:`Check`
lines and a sentence (pure), and :func:`render` shows them. The command's exit status is 0 if nothing needs mending,
else 1.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import site
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version
from rich.console import Console
from rich.text import Text

from ddtrace_pytorch import __version__, settings
from ddtrace_pytorch.cli import probes
from ddtrace_pytorch.cli.command_line import CommandLine, look_at
from ddtrace_pytorch.cli.terminal import standard_output
from ddtrace_pytorch.identity import job as jobs
from ddtrace_pytorch.kernels import sampler_library
from ddtrace_pytorch.patch import SUPPORTED_TORCH
from ddtrace_pytorch.plain_numbers import BUILD_ANEW, Part, part
from ddtrace_pytorch.visible import visible

TIMEOUT_SECONDS = 60.0

NAME = "ddtrace-pytorch"
WHEEL = "wheel"
PTH = "ddtrace_pytorch.pth"
# As pyproject.toml declares them.
NEEDED = {"ddtrace": ">=4.14", "wrapt": ">=1.17,<3", "nvidia-ml-py": ">=12"}

SHOWN = (*settings.SWITCHES, "TORCH_DEVICE_BACKEND_AUTOLOAD", "DD_TRACE_AGENT_URL")
SWITCH_ON = (
    "set DD_PATCH_MODULES=pytorch:true in the job's environment and start it with ddtrace-run "
    "(unless the training script itself calls ddtrace_pytorch.patch(): doctor finds that in a command line given to it)"
)
DOORS = {"pth": "the start-up file", "torch.backends": "the torch.backends entry point"}

GOOD, BAD, NOTE = "good", "bad", "note"
MARKS = {GOOD: ("✓", "+", "green"), BAD: ("✗", "x", "bold red"), NOTE: ("–", "-", "dim")}


@dataclass(frozen=True)
class Facts:
    """What was found. `answers` are the probes', by name; what isn't there is None, and so is a command not given."""

    location: str
    install: str
    python: str
    c_part: Part
    sampler: bool
    packages: dict[str, str | None]
    pth: str | None
    pth_beside: str | None
    entry_point: bool
    environ: Mapping[str, str]
    settings: settings.Settings
    job: jobs.Job
    command: CommandLine | None
    answers: dict[str, probes.Answer]


@dataclass(frozen=True)
class Check:
    """One line: `state` is ``good``, ``bad`` or ``note``; a bad one says in `todo` what to do."""

    topic: str
    state: str
    text: str
    todo: str | None = None


# ---- finding out ----


def gather(
    environ: Mapping[str, str] = os.environ, timeout: float = TIMEOUT_SECONDS, command: Sequence[str] = ()
) -> Facts:
    """Look around, at most about `timeout` seconds, for a job that `command` would start."""
    location, install = _installed()
    return Facts(
        location=location,
        install=install,
        python=f"{platform.python_version()} ({sys.executable})",
        c_part=part,
        sampler=sampler_library.find() is not None,
        packages={name: _version(name) for name in NEEDED},
        pth=_pth(),
        pth_beside=_existing(os.path.join(location, PTH)) if install == WHEEL else None,
        entry_point=any(
            point.name == "ddtrace_pytorch" for point in importlib.metadata.entry_points(group="torch.backends")
        ),
        environ=dict(environ),
        settings=settings.load(environ),
        job=jobs.identify(environ),
        command=look_at(command) if command else None,
        answers=probes.ask(tuple(probes.PROBES), timeout),
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _installed() -> tuple[str, str]:
    """Where this package runs from, and how it came there."""
    location = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    try:
        distribution = importlib.metadata.distribution(NAME)
    except importlib.metadata.PackageNotFoundError:
        return location, "not installed, found on the path"
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        return location, "editable install"
    if os.path.realpath(str(distribution.locate_file("ddtrace_pytorch"))) == os.path.realpath(location):
        return location, WHEEL
    return location, f"found on the path before the wheel installed in {distribution.locate_file('')}"


def _pth() -> str | None:
    directories = [*site.getsitepackages(), site.getusersitepackages()]
    return next(filter(None, (_existing(os.path.join(directory, PTH)) for directory in directories)), None)


def _existing(path: str) -> str | None:
    return path if os.path.isfile(path) else None


# ---- judging ----


def examine(facts: Facts) -> list[Check]:
    """Every check, in the order shown."""
    return [Check(topic, *line) for topic, rule in RULES.items() for line in rule(facts)]


Line = tuple[str, str] | tuple[str, str, str]


def _versions(facts: Facts) -> Iterator[Line]:
    yield GOOD, f"{NAME} {__version__}, {facts.install}: {facts.location}"
    yield GOOD, f"Python {facts.python}"
    yield _counting(facts)
    yield (GOOD, "kernel sampler: built") if facts.sampler else (NOTE, "kernel sampler: not built")
    for name, wanted in NEEDED.items():
        version = facts.packages[name]
        if version is None:
            yield BAD, f"{name} is not installed", f"pip install '{name}{wanted}'"
        elif not _within(version, wanted):
            yield BAD, f"{name} {version} is out of the supported range {wanted}", f"pip install '{name}{wanted}'"
        else:
            yield GOOD, f"{name} {version}"
    torch = facts.answers["torch"]
    if "error" in torch:
        yield BAD, f"torch can't be imported: {torch['error']}", "install a torch that imports with this Python"
        return
    build = "CUDA " + torch["cuda"] if torch["cuda"] else "ROCm " + torch["hip"] if torch["hip"] else "CPU only"
    if not _within(torch["version"], SUPPORTED_TORCH):
        yield (
            BAD,
            f"torch {torch['version']} ({build}) is out of the supported range {SUPPORTED_TORCH}",
            f"pip install 'torch{SUPPORTED_TORCH}'",
        )
    else:
        yield GOOD, f"torch {torch['version']} ({build})"
    if not torch["distributed"]:
        yield NOTE, "this torch is built without torch.distributed: only single-process training is seen"


def _counting(facts: Facts) -> Line:
    asked = facts.settings.instrument
    in_python = "collectives are counted in Python, at twice the cost"
    if facts.c_part is Part.OTHER:
        return BAD, f"{in_python}: the part in C was built for another version", BUILD_ANEW
    if facts.c_part is Part.MISSING:
        return NOTE, f"{in_python}: the part in C was not built, as where there is no C compiler"
    if asked == "python":
        return NOTE, f"{in_python}: DD_PYTORCH_INSTRUMENT=python"
    return GOOD, "collectives are counted by the part in C"


def _doors(facts: Facts) -> Iterator[Line]:
    autoload = facts.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    torch = facts.answers["torch"]
    if facts.pth:
        yield GOOD, f"start-up file {facts.pth}"
    elif facts.pth_beside:
        yield NOTE, f"start-up file {facts.pth_beside}, which Python does not read there: only in its site-packages"
    else:
        yield NOTE, "no start-up file (only a wheel brings one)"
    if not facts.entry_point:
        yield NOTE, "no torch.backends entry point (only an installed package has one)"
    elif autoload == "0":
        yield NOTE, "torch.backends entry point, shut by TORCH_DEVICE_BACKEND_AUTOLOAD=0"
    elif "error" not in torch and not _within(torch["version"], ">=2.5.0.dev0"):
        yield NOTE, "torch.backends entry point, which torch uses from 2.5 on"
    else:
        yield GOOD, "torch.backends entry point"
    if "error" in torch:
        return
    if torch["door"] and torch["finder"]:
        by = DOORS.get(torch["door"], torch["door"])
        yield GOOD, f"`import torch` in a fresh interpreter loads this package, by {by}"
    else:
        reopen = " and unset TORCH_DEVICE_BACKEND_AUTOLOAD" if autoload == "0" else ""
        yield (
            BAD,
            "`import torch` in a fresh interpreter does not load this package; ddtrace would use its own integration",
            f"pip install --force-reinstall {NAME}{reopen}, or call ddtrace_pytorch.patch() in the training script",
        )


def _instrumentation(facts: Facts) -> Iterator[Line]:
    answer, chosen, command = facts.answers["instrumentation"], facts.settings, facts.command
    asked = [f"{name}={facts.environ[name]}" for name in settings.SWITCHES if name in facts.environ]
    asked_text = " and ".join(asked)
    patched_by = command.patched_by if command else None
    if command and command.missing:
        yield (
            BAD,
            f"there is no such file as {command.missing}: what it does can't be told",
            "run doctor where the job is started, in its directory, or correct the script's path",
        )
    if "error" in answer:
        if "error" not in facts.answers["torch"]:
            yield BAD, f"ddtrace-run could not be tried: {answer['error']}", _ddtrace_broken(facts, answer["error"])
        elif not _asked(facts.environ) and not patched_by:
            yield BAD, f"off under ddtrace-run: {_not_asked(asked)}", SWITCH_ON
        return
    # As ddtrace reads it, which is narrower than our own reading: `yes`, or nothing at all, turns its tracing off.
    enabled = facts.environ.get("DD_TRACE_ENABLED", "true").strip()
    off = enabled.lower() not in ("true", "1")
    if off:
        yield (
            BAD,
            f"DD_TRACE_ENABLED={enabled} turns all tracing off: ddtrace takes anything but true and 1 for false",
            "unset DD_TRACE_ENABLED",
        )
    if chosen.export == "none":
        yield BAD, "DD_PYTORCH_EXPORT=none: nothing is recorded", "unset DD_PYTORCH_EXPORT"
    if patched_by:
        yield GOOD, f"switched on by the script itself, at {patched_by}"
    elif answer["on"]:
        if not off:
            yield GOOD, f"on under ddtrace-run ({asked_text})" if asked else "on under ddtrace-run"
            yield _without_ddtrace_run(facts, asked_text)
    elif answer["built_in"]:
        yield BAD, "under ddtrace-run, ddtrace's own built-in integration is on instead", "see Loading, above"
    elif not _asked(facts.environ):
        yield BAD, f"off under ddtrace-run: {_not_asked(asked)}", SWITCH_ON
    elif not off:
        yield (
            BAD,
            f"off under ddtrace-run, though {asked_text} asks for it",
            "DD_TRACE_DEBUG=true ddtrace-run python -c 'import torch' says more",
        )
        for line in answer["stderr"]:
            yield NOTE, f"on stderr: {line}"


def _without_ddtrace_run(facts: Facts, asked: str) -> Line:
    """Of a job that is asked for by its environment: whether anything in it reads that."""
    if facts.answers["torch"].get("on"):
        return GOOD, "on in whatever is started as doctor was: every Python loads ddtrace there"
    command, nothing = facts.command, f"{asked or 'the switch'} is set, but without ddtrace nothing reads it"
    if command is None:
        return NOTE, f"off without it: {nothing}; start with ddtrace-run or import ddtrace.auto"
    if command.opened_by:
        return GOOD, f"`{command}` lets ddtrace in, by {command.opened_by}"
    return (
        BAD,
        f"`{command}` would not be traced: {nothing}",
        f"start with ddtrace-run (`ddtrace-run {command}`) or import ddtrace.auto in the training script",
    )


def verdict(facts: Facts) -> str:
    """What would become of a job, where there is nothing to do."""
    command = facts.command
    if command and (command.opened_by or command.patched_by):
        return f"`{command}` would be traced from here."
    if facts.answers["torch"].get("on"):
        started = "Started as doctor was, under ddtrace-run or from a shell that is"
        return f"{started}, `{command or 'torchrun train.py'}` would be traced."
    return "`ddtrace-run torchrun train.py` would be traced from here; `torchrun train.py` alone would not."


def _not_asked(switches: list[str]) -> str:
    if not switches:
        return "neither DD_PATCH_MODULES nor DD_TRACE_PYTORCH_ENABLED is set"
    return " and ".join(switches) + f" {'do' if len(switches) > 1 else 'does'} not ask for pytorch"


def _ddtrace_broken(facts: Facts, error: str) -> str:
    """What to do about a ddtrace that fails at once: most often it refuses the Agent's address."""
    url = facts.environ.get("DD_TRACE_AGENT_URL", "").strip()
    return "correct or unset DD_TRACE_AGENT_URL" if url and url in error else "pip install --force-reinstall ddtrace"


def _asked(environ: Mapping[str, str]) -> bool:
    """Whether ddtrace is asked for its pytorch integration: DD_PATCH_MODULES wins."""
    pairs = (part.partition(":") for part in environ.get("DD_PATCH_MODULES", "").replace(" ", ",").split(","))
    asked = {name.strip(): value.strip() for name, _, value in pairs}
    value = asked.get("pytorch", environ.get("DD_TRACE_PYTORCH_ENABLED", ""))
    return value.lower() in ("true", "1")


def _agent(facts: Facts) -> Iterator[Line]:
    answer, export = facts.answers["agent"], facts.settings.export
    if not facts.settings.to_agent:
        yield NOTE, f"not used: DD_PYTORCH_EXPORT={export}"
    elif "error" in answer:
        text = f"could not be asked: {answer['error']}"
        yield (BAD, text, _ddtrace_broken(facts, answer["error"])) if facts.packages["ddtrace"] else (NOTE, text)
    elif answer["url"] is None:
        yield NOTE, "none in between: ddtrace sends to the intake itself"
    elif answer["answers"]:
        yield GOOD, f"answers at {answer['url']} ({answer['ms']:g} ms)"
    elif export == "agent":
        yield (
            BAD,
            f"none answers at {answer['url']} ({answer['ms']:g} ms), and DD_PYTORCH_EXPORT=agent keeps nothing else",
            "start an Agent, point DD_TRACE_AGENT_URL at one, or unset DD_PYTORCH_EXPORT",
        )
    else:
        goes = f"; the run log goes to {facts.settings.log_root} (to read it: {NAME} report)"
        yield NOTE, f"none answers at {answer['url']} ({answer['ms']:g} ms){'' if _log_trouble(facts) else goes}"


def _log(facts: Facts) -> Iterator[Line]:
    answer, chosen = facts.answers["log"], facts.settings
    wanted = chosen.to_log(facts.answers["agent"].get("answers", False))
    if why := _log_trouble(facts):
        if wanted:
            yield BAD, f"can't be written: {why}", "set DD_PYTORCH_LOG_DIR to a directory that you can write to"
        else:
            yield NOTE, f"could not be written, and is not needed now: {why}"
        return
    free = answer["free_bytes"]
    text = f"{answer['directory']} can be written, {free / (1 << 30):,.1f} GiB free"
    if not wanted:
        yield NOTE, f"{text}; not needed now"
    elif free < chosen.log_max_mb * (1 << 20):
        yield NOTE, f"{text}: less than the {chosen.log_max_mb:g} MiB that one rank may take (DD_PYTORCH_LOG_MAX_MB)"
    else:
        yield GOOD, text


def _handlers(facts: Facts) -> Iterator[Line]:
    answer = facts.answers["handlers"]
    todo = "correct or unset DD_PYTORCH_LOG_HANDLERS, or have PYTHONPATH name the directory that the module is in"
    if "error" in answer:
        yield BAD, f"the factories in DD_PYTORCH_LOG_HANDLERS could not be imported: {answer['error']}", todo
        return
    for found in answer["handlers"]:
        if found["why"] is None:
            yield GOOD, f"{found['path']} is there"
        else:
            yield BAD, f"{found['path']} is not to be had from here: {found['why']}", todo


def _log_trouble(facts: Facts) -> str | None:
    answer = facts.answers["log"]
    why: str | None = answer.get("error") or answer["why"]
    return why


def _gpu(facts: Facts) -> Iterator[Line]:
    answer, torch = facts.answers["gpu"], facts.answers["torch"]
    if "error" in answer:
        yield NOTE, f"NVML could not be asked: {answer['error']}"
        return
    if torch.get("hip"):
        yield NOTE, "this torch is built for ROCm: NVML, where GPU facts come from, knows NVIDIA's GPUs only"
    if not answer["count"]:
        yield NOTE, f"none found ({answer.get('why_none') or 'NVML sees no GPU'})"
        return
    many = f"{answer['count']} GPU{'s' if answer['count'] > 1 else ''}, driver {answer['driver']}"
    device = answer["device"]
    if device is None:
        yield NOTE, f"{many}; none is visible under CUDA_VISIBLE_DEVICES={facts.environ.get('CUDA_VISIBLE_DEVICES')}"
    else:
        yield GOOD, f"{many}; the first one here is {device['name']} {device['uuid']}"
        for complaint in device["complaints"]:
            yield NOTE, complaint
    if not (torch.get("cuda") or torch.get("hip") or "error" in torch):
        yield NOTE, "this torch is built without CUDA and uses none of them"


def _job(facts: Facts) -> Iterator[Line]:
    job = facts.job
    launcher = f", launched by {job.launcher}" if job.launcher else ""
    attempt = "" if job.attempt is None else f", attempt {job.attempt} (from {job.attempt_source})"
    if job.id is None:
        yield (
            NOTE,
            f"no job id in this environment{launcher}{attempt}; the ranks make one up together, "
            "unless the launcher gives one (torchrun does)",
        )
    else:
        yield GOOD, f"job {job.id} (from {job.source}){launcher}{attempt}"
    for complaint in job.complaints:
        yield NOTE, complaint


def _settings(facts: Facts) -> Iterator[Line]:
    complaints = facts.settings.complaints
    rows = [(row.variable, row.default) for row in settings.TABLE]
    told = False
    for variable, default in [*((name, "") for name in SHOWN), *rows]:
        value = facts.environ.get(variable, "").strip()
        if value and value != default and not any(text.startswith(f"{variable}=") for text in complaints):
            yield NOTE, f"{variable}={value}"
            told = True
    for complaint in complaints:
        variable, *_ = re.split(r"\W", complaint, maxsplit=1)
        yield BAD, complaint, f"correct or unset {variable}"
    if not told and not complaints:
        yield GOOD, "all at their defaults"


RULES: dict[str, Callable[[Facts], Iterator[Line]]] = {
    "Versions": _versions,
    "Loading": _doors,
    "Instrumentation": _instrumentation,
    "Agent": _agent,
    "Run log": _log,
    "Handlers": _handlers,
    "GPU": _gpu,
    "Job": _job,
    "Settings": _settings,
}


def _within(version: str, wanted: str) -> bool:
    try:
        return SpecifierSet(wanted).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def todo(checks: list[Check]) -> list[str]:
    """What to do, each thing once, in the order of the checks."""
    return list(dict.fromkeys(check.todo for check in checks if check.todo))


# ---- showing it ----


def render(checks: list[Check], verdict: str, console: Console) -> None:
    """Show `checks` by topic, then what to do: `verdict` if that is nothing."""
    plain = console.options.ascii_only
    topic = None
    for check in checks:
        if check.topic != topic:
            topic = check.topic
            console.print(Text(topic, style="bold"), soft_wrap=True)
        mark, ascii_mark, style = MARKS[check.state]
        line = Text("  ").append(ascii_mark if plain else mark, style=style).append(f" {visible(check.text)}")
        console.print(line, soft_wrap=True)
    console.print()
    things = todo(checks)
    if not things:
        console.print(Text(f"What to do: nothing. {visible(verdict)}"), soft_wrap=True)
    elif len(things) == 1:
        console.print(Text(f"What to do: {visible(things[0])}"), soft_wrap=True)
    else:
        console.print(Text("What to do:"))
        for number, thing in enumerate(things, 1):
            console.print(Text(f"  {number}. {visible(thing)}"), soft_wrap=True)


@click.command(
    short_help="Would a job started from here be traced?",
    context_settings={"allow_interspersed_args": False},
)
@click.option("--json", "as_json", is_flag=True, help="Print the checks as JSON.")
@click.argument("command", nargs=-1, metavar="[COMMAND...]", type=click.UNPROCESSED)
@click.pass_context
def doctor(context: click.Context, as_json: bool, command: tuple[str, ...]) -> None:
    """Whether a job started from here would be traced, and if not, what to do.

    Run it where the job runs, with the job's environment. It starts a few interpreters, which takes some seconds.
    With the job's COMMAND (torchrun train.py, for example) it says whether that one would be traced: the command is
    looked at, with the scripts it names, and not run.
    """
    if sys.stderr.isatty():
        with Console(stderr=True).status("asking torch, ddtrace and the Agent …"):
            facts = gather(command=command)
    else:
        facts = gather(command=command)
    checks = examine(facts)
    things = todo(checks)
    if as_json:
        found: dict[str, Any] = {"would_trace": not things, "what_to_do": things}
        click.echo(
            json.dumps(found | {"checks": [asdict(check) for check in checks], "answers": facts.answers}, indent=2)
        )
    else:
        render(checks, verdict(facts), standard_output())
    context.exit(1 if things else 0)
