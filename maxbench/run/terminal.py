"""What a person sees of a run: on a terminal a line per step, and a live bar with a clock under
it; at the end, anywhere, what was measured and how it compares."""

import dataclasses
import shutil
import statistics
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping

Parts = Mapping[str, Mapping[str, str]]  # titles -> labels -> text
AGAIN = 40  # lines of steps between two heads
SLOW = 1.1  # times the median of the steps so far: shown in another colour
NARROW = 60  # columns of the narrowest summary


def on_screen():
    """A Screen where stdout is a terminal, else None."""
    return Screen() if sys.stdout.isatty() else None


@dataclasses.dataclass(frozen=True)
class Column:
    """A figure of every step: its head, its format, and whether this device tells of it."""

    head: str
    name: str  # in what Screen.step is given
    form: str

    @property
    def width(self) -> int:
        return max(len(self.head), len(format(0, self.form)))


COLUMNS = (
    Column("step", "step", "6d"),
    Column("loss", "loss", "8.4f"),
    Column("grad norm", "grad_norm", "9.3f"),
    Column("s/step", "step_s", "7.3f"),
    Column("tokens/s", "tokens_per_s", "10,.0f"),  # of devices that are no GPUs
    Column("tokens/s/GPU", "tokens_per_s_per_gpu", "12,.0f"),
    Column("TFLOP/s", "tflops", "7.1f"),
    Column("MFU", "mfu", "6.1%"),
    Column("GiB", "gib", "6.1f"),
    Column("lr", "lr", "9.2e"),
)


class Screen:
    """A terminal while a run goes on: the live bar says what is done, and for how long."""

    def __init__(self):
        from rich import console, progress  # only a terminal needs it

        self.console = console.Console(highlight=False, markup=False)
        self.live = progress.Progress(
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description:<8}", style="bold"),
            progress.BarColumn(),
            progress.TextColumn("{task.fields[count]}"),
            progress.TimeElapsedColumn(),
            progress.TextColumn("{task.fields[left]}", style="dim"),
            console=self.console,
            refresh_per_second=4,  # it takes time from the threads that train
            transient=True,
        )
        self.columns: list[Column] = []
        self.lines, self.times = 0, []
        self.live.start()
        self.phase("start")

    def phase(self, name: str, done: int = 0, total: int | None = None) -> None:
        """What the run does from now on: start, compile, steps (of `total`), save."""
        for task in self.live.task_ids:
            self.live.remove_task(task)
        count = f"{done}/{total}" if total else ""
        self.live.add_task(name, total=total, completed=done, count=count, left="")
        self.first, self.began = done, time.monotonic()

    def line(self, text: str) -> None:
        """A line of the log."""
        whole = max(map(len, text.split()), default=0) > self.console.width  # a path, to be copied
        self._print((text, "dim"), soft_wrap=whole)

    def _print(self, *cells: tuple[str, str], **how) -> None:
        from rich.text import Text

        self.console.print(Text.assemble(*cells), **how)

    def step(self, figures: Mapping[str, float], total: int) -> None:
        """The line of a step, from its figures by the names in COLUMNS."""
        if not self.columns:
            self.columns = fitting(figures, self.console.width)
        if self.lines % AGAIN == 0:
            heads = "  ".join(f"{c.head:>{c.width}}" for c in self.columns)
            self._print((heads, "bold"), overflow="crop", no_wrap=True)
        self.lines += 1
        usual = statistics.median(self.times[-99:] or [figures["step_s"]])
        self.times.append(figures["step_s"])
        slow = len(self.times) > 2 and figures["step_s"] > SLOW * usual
        styles = {"step": "dim", "loss": "cyan", "mfu": "green", "step_s": "yellow" * slow}
        cells = [
            (f"{figures[c.name]:{c.form}}".rjust(c.width), styles.get(c.name, ""))
            for c in self.columns
        ]
        spaced = [part for cell in cells for part in (("  ", ""), cell)][1:]
        self._print(*spaced, overflow="crop", no_wrap=True)
        done = int(figures["step"]) + 1
        each = (time.monotonic() - self.began) / max(1, done - self.first)
        left = f"{clock(each * (total - done))} left"
        task = self.live.task_ids[0]
        self.live.update(task, completed=done, count=f"{done}/{total}", left=left)

    def summary(self, parts: Parts) -> None:
        """The closing summary."""
        for label, text in lines(parts, self.console.width):
            self._print((label, "dim" if text else "bold"), (text, ""), soft_wrap=True)
        self.console.print()

    def stop(self) -> None:
        """Takes the bar away; lines stay."""
        self.live.stop()


def fitting(figures: Mapping[str, float], width: int) -> list[Column]:
    """The columns that a step has figures of, as many as a terminal has room for."""
    kept, used = [], 0
    twice = {"tokens_per_s"} if "tokens_per_s_per_gpu" in figures else set()
    for column in (c for c in COLUMNS if c.name in figures.keys() - twice):
        used += column.width + 2
        if used - 2 <= width:
            kept.append(column)
    return kept


def clock(seconds: float) -> str:
    """'1:02:03', or '2:03' below an hour."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def closing(result: Mapping) -> Parts:
    """The end of a run in two parts, each a label and a figure per line.

    Figures that mean nothing on a device are left out: a rate beside no peak, days on a CPU.
    """
    device, gpu = result["device"], result["device"]["platform"] != "cpu"
    measured = {
        "run": result["name"],
        "status": " ".join([result["status"], result["reason"].removeprefix("stopped ")]).strip(),
        "device": f"{device['count']} x {device['kind']}",
    }
    if "step_s" in result:
        s, (first, last) = result["step_s"], result["window"]
        measured |= {
            f"step time (steps {first} to {last})": f"{s['mean']:.3f} s, std {s['std']:.3f}",
            "  median, p10, p90": f"{s['median']:.3f}, {s['p10']:.3f}, {s['p90']:.3f} s",
            "tokens/s": f"{result['tokens_per_s']:,.0f}",
        }
        rates = (f"{v:.2f} ({c})" for c, v in result["tflops_per_gpu"].items())
        measured |= {"TFLOP/s per GPU": ", ".join(rates)} if gpu else {}
    if loss := result.get("loss"):
        (a, x), (b, y) = loss["first"], loss["last"]
        measured["loss"] = f"{x:.4f} at step {a}, {y:.4f} at step {b}"
    if "peak_bytes" in result:
        label = "peak memory per GPU" if gpu else "peak memory, process"
        measured[label] = f"{result['peak_bytes'] / 2**30:.2f} GiB"
    if "start_to_first_step_s" in result:
        start, compiled = result["start_to_first_step_s"], result["compile_s"]
        measured["start to first step"] = f"{start:.1f} s (compile {compiled:.1f} s)"
    return {"measured": measured, "how it compares": compared(result)}


def compared(result: Mapping) -> dict[str, str]:
    """What was measured beside the device's peak, published figures, and the other hosts."""
    rows = {}
    if mfu := {c: v for c, v in result.get("mfu", {}).items() if v is not None}:
        dtype = result["config"]["precision"]["dtype"]
        shares = ", ".join(f"{v:.2%} ({c})" for c, v in mfu.items())
        rows |= {f"MFU against the {dtype} peak": shares}
        rows |= {"days to 1T tokens": f"{result['days_to_1t_tokens']:,.2f}"}
    if names := ",".join(result.get("slow_hosts", ())):
        rows["slow hosts"] = f"{names}; leave them out: EXCLUDE_NODES={names}"
    if row := result.get("published"):
        known = f"{row['step_s']} s on {row['gpus']}, {row['source']}: " if "step_s" in row else ""
        rows["published"] = known + row["verdict"]
    return rows or {"published": "no step was measured"}


def text(parts: Parts) -> str:
    """Parts as text: as wide as the terminal, where stdout is one."""
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return "\n".join(label + told for label, told in [*lines(parts, columns)][1:])


def summary(parts: Parts) -> str:
    """closing() as text, a line for each label."""
    return "\n".join(label + text for label, text in lines(parts))


def lines(parts: Parts, width: int | None = None) -> Iterator[tuple[str, str]]:
    """closing() as lines up to so many columns: a label and what stands behind it."""
    wide = 2 + max(len(label) for rows in parts.values() for label in rows)
    for title, rows in parts.items():
        yield from (("", ""), (title, ""))
        for label, text in rows.items():
            room = max(width, NARROW) - wide if width else len(text) + 1
            for part in folded(text, room):
                yield f"{label:<{wide}}", part
                label = ""


def folded(text: str, width: int) -> list[str]:
    """Text in lines up to so many columns, cut at spaces, else behind _ and /, else anywhere."""
    cuttable = text.replace("_", "_\0").replace("/", "/\0")
    if all(len(word) <= width for word in text.split()):
        return textwrap.wrap(text, width, break_on_hyphens=False) or [""]
    lines = [""]
    for piece in cuttable.replace(" ", " \0").split("\0"):
        if len(lines[-1]) + len(piece.rstrip()) > width and lines[-1]:
            lines.append("")
        lines[-1] += piece
    cut = (line[i : i + width] for line in lines for i in range(0, max(1, len(line)), width))
    return [line.rstrip() for line in cut]
