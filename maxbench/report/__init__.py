"""Runs that are over: compared, judged, shown."""

from maxbench.spec.notebook import make_callable


def _report(*paths: str, **given):
    """maxbench.report.reading.report: what `maxbench report` does, as an object."""
    from maxbench.report import reading  # late, so that the package is imported at once

    return reading.report(*paths, **given)


make_callable(__name__, _report)
