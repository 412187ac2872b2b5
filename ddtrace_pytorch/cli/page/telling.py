"""The page of a report: what it needs beyond that is the diagnosis."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ddtrace_pytorch import settings
from ddtrace_pytorch.cli.choice import jobs_in
from ddtrace_pytorch.cli.diagnosis import dumps_in, of_attempt
from ddtrace_pytorch.cli.page.document import Seen, page
from ddtrace_pytorch.cli.page.gathering import View
from ddtrace_pytorch.cli.summary import Report
from ddtrace_pytorch.runlog.reader import Scan
from ddtrace_pytorch.stalls import places
from ddtrace_pytorch.stalls.recovery import look


def page_of(found: Scan, report: Report, views: Mapping[str, View]) -> bytes:
    """The page of `report`, which was made of `found` together with `views`. Looks at what ranks left on this host."""
    left_behind = partial(look, places.roots(settings.load().state_dir))
    job, notes = report.job.id, list(report.notes)
    dumps = dumps_in(found, notes)
    in_job = jobs_in(found).logs_of(job)
    attempts = []
    for one in report.attempts:
        logs = [log for log in in_job if log.incarnation == one.incarnation]
        view, left = views[one.incarnation], left_behind(job, one.incarnation)
        what = of_attempt(one.number, one.incarnation, logs, view.histories, left, dumps, notes)
        attempts.append(Seen(one, what, view))
    return page(report, attempts, notes).encode()
