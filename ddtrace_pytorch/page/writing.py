"""Reads what the page needs beyond the report, and writes it."""

from __future__ import annotations

from functools import partial

from ddtrace_pytorch import settings
from ddtrace_pytorch.cli.choice import jobs_in
from ddtrace_pytorch.cli.diagnosis import dumps_in, of_attempt
from ddtrace_pytorch.cli.output import written
from ddtrace_pytorch.cli.summary import Report
from ddtrace_pytorch.page.document import Seen, page
from ddtrace_pytorch.page.gathering import gather
from ddtrace_pytorch.runlog.reader import Scan
from ddtrace_pytorch.stalls import places
from ddtrace_pytorch.stalls.recovery import look


def write_page(found: Scan, report: Report, path: str) -> int:
    """Write the page of `report`, which was made of `found`, to `path`; gives its size in bytes.

    Raises:
        NotWritable: it can't be.
    """
    left_behind = partial(look, places.roots(settings.load().state_dir))
    job, notes = report.job.id, list(report.notes)
    dumps = dumps_in(found, notes)
    in_job = jobs_in(found).logs_of(job)
    with written(path) as file:
        attempts = []
        for one in report.attempts:
            logs = [log for log in in_job if log.incarnation == one.incarnation]
            view = gather(logs)
            left = left_behind(job, one.incarnation)
            what = of_attempt(one.number, one.incarnation, logs, view.histories, left, dumps, notes)
            attempts.append(Seen(one, what, view))
        text = page(report, attempts, notes).encode()
        file.write(text)
    return len(text)
