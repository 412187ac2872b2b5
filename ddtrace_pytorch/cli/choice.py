"""Which run logs a command is about: the directory, the job in it and its attempt, as people name them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import click

from ddtrace_pytorch import settings
from ddtrace_pytorch.cli import starts
from ddtrace_pytorch.runlog.reader import RankLog, Scan, scan
from ddtrace_pytorch.visible import visible

job_option = click.option(
    "--job", metavar="ID", help="The job to report, by its id or the beginning of it; otherwise the newest."
)
attempt_option = click.option(
    "--attempt",
    default="last",
    show_default=True,
    metavar="last|N|INCARNATION|all",
    help="Which of the job's attempts: numbered from 1 in order of time, or by the beginning of its incarnation.",
)


class Refused(click.ClickException):
    """There is nothing to report; the message says what is wrong, where, and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(visible(message))


class NotThere(Refused):
    """What was asked for doesn't exist."""

    exit_code = 2


class NotReadable(Refused):
    """The directory is there, but no run log that can be read is in it."""

    exit_code = 1


def run_logs(directory: str | None, beside: Callable[[str], bool] = lambda name: False) -> Scan:
    """The run logs in `directory`, or where they usually are; `beside`: as :func:`scan` has it.

    Raises:
        Refused: it can't be looked into.
    """
    chosen = settings.load()
    place = directory or chosen.log_root
    try:
        return scan(place, beside)
    except FileNotFoundError:
        if directory:
            text = f"no directory {place}; give the one that DD_PYTORCH_LOG_DIR had in the job"
        elif chosen.log_dir:
            text = f"no directory {place}, which DD_PYTORCH_LOG_DIR names; no job has written there yet"
        else:
            text = (
                f"no directory {place}, where run logs go when DD_PYTORCH_LOG_DIR is not set; give the one that it had "
                "in the job (without it, a job whose Agent answers writes no run log)"
            )
        raise NotThere(text) from None
    except NotADirectoryError:
        raise NotThere(f"{place} is a file; give the directory it is in") from None
    except OSError as error:
        raise NotReadable(f"can't look into {place}: {error.strerror or error}") from None


@dataclass(frozen=True)
class Jobs:
    """What a directory holds that can be read; `ids` are of all jobs, newest first."""

    directory: str
    ids: Sequence[str]
    logs: Sequence[RankLog]

    def meant(self, asked: str | None) -> str:
        """The id that is `asked` for, by its beginning if no other has that; otherwise the newest job's.

        Raises:
            NotThere: there is none, or several.
        """
        meant = self.ids[:1] if asked is None else matching(asked, self.ids)
        if not meant:
            raise NotThere(f"no job {asked} in {self.directory}; the jobs there: {shorten(self.ids)}")
        if len(meant) > 1:
            raise NotThere(f"{len(meant)} jobs in {self.directory} begin with {asked}: {shorten(meant)}")
        return meant[0]

    def logs_of(self, job: str) -> list[RankLog]:
        return [log for log in self.logs if log.job == job]


def jobs_in(found: Scan) -> Jobs:
    """The jobs of `found`. Ranks of one start that couldn't agree on an incarnation have the same one from here on.

    Raises:
        NotReadable: there is none.
    """
    logs = [log for log in found.logs if not log.damaged]
    if not found.logs:
        raise NotReadable(
            f"no run log in {found.directory}: it should hold rank-00000.jsonl and the like, at any depth; "
            "run a job with DD_PYTORCH_EXPORT=local, or name another directory"
        )
    if not logs:
        first = f" ({found.logs[0].notes[0]})" if found.logs[0].notes else ""
        raise NotReadable(
            f"none of the {len(found.logs)} run log(s) in {found.directory} can be read{first}; "
            "copy them again from where they were written"
        )
    found.notes += starts.join(logs)
    begun = {log.job: 0 for log in logs}
    for log in logs:
        begun[log.job] = max(begun[log.job], log.began)
    return Jobs(found.directory, sorted(begun, key=lambda id: begun[id], reverse=True), logs)


def meant_attempts(asked: str, incarnations: Sequence[str], job: str, beside: int = 0) -> list[int]:
    """Which of the `incarnations` of `job`, in order, are `asked` for: ``last``, ``all``, a number from 1 on or the
    beginning of one. Gives where they are in it. The final ones, `beside` many, are no attempts of the training: the
    last is none of them, if there are others.

    Raises:
        NotThere: there is none, or several.
    """
    if asked == "all":
        return list(range(len(incarnations)))
    if asked == "last":
        return [(len(incarnations) - beside or beside) - 1]
    # A plain number is never the beginning of an incarnation, which begins with its year.
    names = [] if asked.isdecimal() else matching(asked, incarnations)
    found = [at for at, name in enumerate(incarnations) if str(at + 1) == asked or name in names]
    if not found:
        raise NotThere(f"no attempt {asked} of job {job}; choose last, all, or from 1 to {len(incarnations)}")
    if len(found) > 1:
        raise NotThere(f"{len(found)} attempts of job {job} begin with {asked}: {shorten(names)}")
    return found


def matching(asked: str, names: Sequence[str]) -> list[str]:
    """Of `names` the one that is `asked`, else all that begin so."""
    return [asked] if asked in names else [name for name in names if name.startswith(asked)]


def shorten(names: Sequence[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
