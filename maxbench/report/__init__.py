"""Runs that are over: compared, judged, shown."""

from maxbench.spec.notebook import make_callable

make_callable(__name__, "maxbench.report.reading.report")
