"""The `ddtrace-pytorch` command: a table of subcommands, each loaded when it is asked for."""

from __future__ import annotations

import importlib
import io
import os
import sys
from difflib import get_close_matches
from typing import IO, Any

import click

from ddtrace_pytorch import __version__
from ddtrace_pytorch.cli.output import StandardOutput

COMMANDS = {
    "diagnose": "ddtrace_pytorch.cli.diagnose:diagnose_command",
    "doctor": "ddtrace_pytorch.cli.doctor:doctor",
    "profile": "ddtrace_pytorch.cli.profile:profile_command",
    "recover": "ddtrace_pytorch.cli.recover:recover_command",
    "report": "ddtrace_pytorch.cli.report:report",
    "timeline": "ddtrace_pytorch.cli.timeline:timeline_command",
}


class Interrupted(click.ClickException):
    """By Ctrl-C, in the number that a shell has for it."""

    exit_code = 130

    def __init__(self) -> None:
        super().__init__("Interrupted.")

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(self.message, err=True)


class LazyGroup(click.Group):
    """Imports a subcommand's module when it is used, so that one doesn't pay for another's imports."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not ctx.resilient_parsing:
            near = get_close_matches(name.lower(), COMMANDS, n=1)
            hint = f"Did you mean '{near[0]}'?" if near else f"the commands are {', '.join(self.list_commands(ctx))}"
            ctx.fail(f"No such command {name!r}{'.' if near else ';'} {hint}")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ddtrace-pytorch")
def cli() -> None:
    """Would a distributed PyTorch job be traced, what did one do, and what did it die of?"""


def main() -> None:
    """The console script."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = StandardOutput.instead_of(sys.stdout)
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="backslashreplace")
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    cli(prog_name="ddtrace-pytorch")


if __name__ == "__main__":
    main()
