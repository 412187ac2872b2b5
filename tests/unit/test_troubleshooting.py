"""What docs/troubleshooting.md quotes is what `doctor`, the ranks and `report` really say."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from harness.facts import facts

import ddtrace_pytorch
from ddtrace_pytorch.cli import doctor
from ddtrace_pytorch.cli.command_line import look_at
from ddtrace_pytorch.cli.doctor import BAD, Check, Facts, examine
from ddtrace_pytorch.plain_numbers import Part

PACKAGE = Path(ddtrace_pytorch.__file__).parent
DOCUMENT = Path(__file__).parents[2] / "docs" / "troubleshooting.md"

OFF = {"on": False, "built_in": False, "stderr": ["ddtrace says why"]}
BROKEN = {"error": "it fell over"}
NO_AGENT = {"answers": False}

# All that can be wrong with a machine, a part at a time.
FOUND: dict[str, Facts] = {
    "nothing": facts(),
    "not installed": replace(facts(), packages=dict.fromkeys(doctor.NEEDED)),
    "old": replace(facts(), packages=dict.fromkeys(doctor.NEEDED, "0.1")),
    "no torch": facts(torch=BROKEN),
    "no torch, not asked for": facts({"DD_PATCH_MODULES": ""}, torch=BROKEN, instrumentation=BROKEN),
    "old torch": facts(torch={"version": "1.13.1"}),
    "torch without distributed": facts(torch={"distributed": False}),
    "torch without CUDA": facts(torch={"cuda": None}),
    "part in C of another version": replace(facts(), c_part=Part.OTHER),
    "part in C missing": replace(facts(), c_part=Part.MISSING),
    "kernel sampler missing": replace(facts(), sampler=False),
    "no door": facts(torch={"door": None, "finder": False}),
    "no start-up file, no entry point": replace(facts(), pth=None, entry_point=False),
    "start-up file elsewhere": replace(facts(), pth=None, pth_beside="/there/ddtrace_pytorch.pth"),
    "entry point shut": facts({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}),
    "ddtrace broken": facts(instrumentation=BROKEN),
    "not asked for": facts({"DD_PATCH_MODULES": ""}, instrumentation=OFF),
    "asked for otherwise": facts({"DD_PATCH_MODULES": "pytorch:yes"}, instrumentation=OFF),
    "asked for in vain": facts(instrumentation=OFF),
    "built-in": facts(instrumentation={"on": False, "built_in": True}),
    "all tracing off": facts({"DD_TRACE_ENABLED": "yes"}),
    "export none": facts({"DD_PYTORCH_EXPORT": "none"}),
    "command without ddtrace-run": facts(command=look_at(("torchrun", __file__))),
    "command without its script": facts(command=look_at(("torchrun", "no/such/train.py"))),
    "no Agent": facts(agent=NO_AGENT),
    "no Agent, nothing else": facts({"DD_PYTORCH_EXPORT": "agent"}, agent=NO_AGENT),
    "Agent's address refused": facts(agent=BROKEN),
    "log not writable": facts(agent=NO_AGENT, log={"why": "read-only"}),
    "log on a small disk": facts({"DD_PYTORCH_EXPORT": "local"}, log={"free_bytes": 1 << 20}),
    "handlers broken": facts(handlers=BROKEN),
    "a handler missing": facts(handlers={"handlers": [{"path": "mine:Sink", "why": "no module"}]}),
    "no GPU": facts(gpu={"count": 0, "why_none": "no driver"}),
    "no GPU visible": facts({"CUDA_VISIBLE_DEVICES": "7"}, gpu={"device": None}),
    "a setting": facts({"DD_PYTORCH_LOG_MAX_MB": "lots", "DD_PYTORCH_LOGDIR": "/logs"}),
}
LINES = [check for found in FOUND.values() for check in examine(found)]


def quotes(heading: str) -> list[str]:
    """What is quoted in the first column of the tables below `heading`."""
    section = DOCUMENT.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \| ", section, re.MULTILINE)
    found = [next(filter(None, one)) for row in rows for one in re.findall(r"`` (.+?) ``|`([^`]+)`", row)]
    assert found
    return found


def fits(quote: str, said: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, quote.split("…"))), said, re.DOTALL) is not None


def skeletons(modules: Path) -> Iterator[str]:
    """Every text in the source of the package, with `…` for what is put into it."""
    for path in modules.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)


DOCTORS = quotes("What doctor says")


@pytest.mark.parametrize("quote", DOCTORS)
def test_doctor_says_what_it_is_quoted_with(quote: str) -> None:
    assert [check for check in LINES if fits(quote, check.text)] != []


def test_of_each_fault_it_is_said_what_to_do() -> None:
    def is_quoted(check: Check) -> bool:
        return any(fits(quote, check.text) for quote in DOCTORS)

    # Of settings there is no end; what is said of them all stands below the tables.
    faults = [check for check in LINES if check.state == BAD and check.topic != "Settings"]
    assert {check.text for check in faults if not is_quoted(check)} == set()
    assert "did you mean" in " ".join(check.text for check in LINES if check.topic == "Settings")


def test_every_fault_that_doctor_knows_is_among_what_can_be_wrong_here() -> None:
    said = [check.text for check in LINES if check.state == BAD]
    known = 0
    for node in ast.walk(ast.parse(Path(doctor.__file__).read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Tuple) and node.elts and ast.unparse(node.elts[0]) == "BAD"):
            continue
        constants = [one.value for one in ast.walk(node.elts[1]) if isinstance(one, ast.Constant)]
        longest = max((text for text in constants if isinstance(text, str)), key=len, default="")
        assert any(longest in text for text in said), longest
        known += bool(longest)
    assert known > 15


RANKS_AND_REPORT = [*quotes("What a rank says on stderr"), *quotes("No ranks in the report, or too few")]
TEXTS = {text for text in skeletons(PACKAGE) if len(text) > 5}


@pytest.mark.parametrize("quote", RANKS_AND_REPORT)
def test_ranks_and_report_say_what_they_are_quoted_with(quote: str) -> None:
    assert [text for text in TEXTS if fits(quote, text)] != []
