"""Reads runs back: tables, plots, verdicts against the published figures.

maxbench report experiments
"""

import os
import pathlib
import shutil
import sys
from collections.abc import Sequence

from absl import flags

from maxbench.hardware.gpus import GPUS
from maxbench.report import compare, page, runlogs, suite, tables
from maxbench.report.planned import look_inside
from maxbench.spec import cli, commands
from maxbench.spec.errors import UserError, choose, plain

# Name -> what makes the text of it, from rows and settings.
FORMATS = {
    "table": tables.text,
    "csv": tables.to_csv,
    "json": tables.to_json,
    "md": tables.markdown,
    "html": page.html,
}


def settings(fv: flags.FlagValues, paths: Sequence[str]) -> compare.Settings:
    """The flags, checked.

    Raises:
      UserError: a flag that cannot be, with what would work.
    """
    choose("format", fv["format"].value, FORMATS)
    if fv["hardware"].value:
        cli.add_hardware(fv["hardware"].value)
    if fv["gpu_type"].value:
        choose("gpu_type", fv["gpu_type"].value, GPUS)
    as_given = ("window", "cost", "gpu_type", "interval", "mtbf", "title", "suite")
    given = {name: fv[name].value for name in as_given}
    if sys.stdout.isatty() and not fv["output"].value:
        given["width"] = shutil.get_terminal_size().columns
    return compare.Settings(paths=tuple(paths), full_names=fv["full-names"].value, **given)


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 1 no run succeeded or a suite did not, 2 bad input."""
    if commands.helped("report", argv):
        return 0
    fv = commands.define("report")
    with cli.clear_errors("report"):
        given, listed = cli.flags_of(fv, argv)[1:], fv["suite"].value
        paths = _of_suite(listed, given) if listed else given or ["experiments"]
        chosen = settings(fv, paths)
        rows = [compare.row(r, chosen) for r in runlogs.read(paths)]
        if not (rows or listed):
            raise UserError(f"no run and no log at or below {', '.join(paths)}")
        look_inside(rows, every=fv["format"].value == "html")
        make = tables.difference if fv["diff"].value else FORMATS[fv["format"].value]
        made = "\n".join(map(plain, make(rows, chosen).split("\n")))
        if file := fv["output"].value:
            try:
                pathlib.Path(file).write_text(made + "\n", encoding="utf-8")
            except OSError as e:
                raise UserError(f"output={file!r} cannot be written: {e.strerror}") from None
    if not fv["output"].value:
        try:
            print(made, flush=True)
        except BrokenPipeError:  # `| head` has seen enough; Python would complain at exit too
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if listed:
        return 0 if suite.judge(listed, rows).ok else 1
    return 0 if any(one.ok or one.record.status == "running" for one in rows) else 1


def _of_suite(file: str, paths: Sequence[str]) -> list[str]:
    """The folders of a suite's runs."""
    if paths:
        raise UserError(f"--suite names its runs itself; leave {paths[0]!r} out")
    return [*map(str, suite.folders(suite.read(file)[1]))]


if __name__ == "__main__":
    sys.exit(main(sys.argv))
