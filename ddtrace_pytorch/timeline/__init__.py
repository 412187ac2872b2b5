"""From run logs to a picture of what each rank did when, for ui.perfetto.dev and chrome://tracing.

The logs are read several times and never held: once for their sizes, steps and clocks (:mod:`survey`), once for what
is joined across ranks (:mod:`arrows`), and once to draw, a rank after the other (:mod:`drawing`).
"""
