"""A run on a terminal: a line per step and a progress bar; and the summary at its end."""

import dataclasses
import math
import shutil
import statistics
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping

from maxbench.terminal.chart import chart
from maxbench.terminal.console import size

Parts = Mapping[str, Mapping[str, str]]  # title -> label -> text
HEADER_EVERY = 40  # lines between two headers
SLOW_FACTOR = 1.1  # of the median step time: slower steps are shown in another colour
DATA_WAIT = 0.01  # share of a step: less is noise
MEDIAN_STEPS = 99  # latest steps in that median
MIN_CHART, MAX_CHART = 20, 100  # steps of a chart of the loss, and its columns
MIN_WIDTH = 60  # columns of the narrowest summary


def on_screen() -> "Screen | None":
    """A Screen if stdout is a terminal, else None."""
    return Screen() if sys.stdout.isatty() else None


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of the lines of steps."""

    header: str
    name: str  # key in the figures of Screen.step()
    format: str

    @property
    def width(self) -> int:
        return max(len(self.header), len(format(0, self.format)))


COLUMNS = (
    Column("step", "step", "6d"),
    Column("loss", "loss", "8.4f"),
    Column("grad norm", "grad_norm", "9.3f"),
    Column("s/step", "step_s", "7.3f"),
    Column("tokens/s", "tokens_per_s", "10,.0f"),  # left out if the next is known
    Column("tokens/s/GPU", "tokens_per_s_per_gpu", "12,.0f"),
    Column("TFLOP/s", "tflops", "7.1f"),
    Column("MFU", "mfu", "6.1%"),
    Column("GiB", "gib", "6.1f"),
    Column("lr", "lr", "9.2e"),
)


class Screen:
    """A terminal during a run, with a progress bar of the current phase."""

    def __init__(self):
        from rich import console, progress  # takes 0.1 s, and is needed on terminals alone

        self.console = console.Console(highlight=False, markup=False)
        self.live = progress.Progress(
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description:<8}", style="bold"),
            progress.BarColumn(),
            progress.TextColumn("{task.fields[count]}"),
            progress.TimeElapsedColumn(),
            progress.TextColumn("{task.fields[left]}", style="dim"),
            console=self.console,
            refresh_per_second=4,  # drawing takes time from the threads that train
            transient=True,
        )
        self.columns: list[Column] = []
        self.line_count, self.times = 0, []
        self.live.start()
        self.phase("start")

    def phase(self, name: str, done: int = 0, total: int | None = None) -> None:
        """Starts a phase of the run: start, compile, steps (of `total`), save."""
        for task in self.live.task_ids:
            self.live.remove_task(task)
        count = f"{done}/{total}" if total else ""
        self.live.add_task(name, total=total, completed=done, count=count, left="")
        self.first_step, self.phase_start = done, time.monotonic()

    def line(self, text: str) -> None:
        """Shows a line of the log."""
        # A path that is longer than the line is not broken, so that it can be copied.
        long_word = max(map(len, text.split()), default=0) > self.console.width
        self._print((text, "dim"), soft_wrap=long_word)

    def _print(self, *cells: tuple[str, str], **options) -> None:
        """Prints texts, each with its style."""
        from rich.text import Text

        self.console.print(Text.assemble(*cells), **options)

    def step(self, figures: Mapping[str, float], total: int) -> None:
        """Shows a step.

        Args:
          figures: by the names in COLUMNS; those of unknown figures are absent.
          total: steps of the run.
        """
        if not self.columns:
            self.columns = fitting_columns(figures, self.console.width)
        if self.line_count % HEADER_EVERY == 0:
            header = "  ".join(f"{c.header:>{c.width}}" for c in self.columns)
            self._print((header, "bold"), overflow="crop", no_wrap=True)
        self.line_count += 1
        median_s = statistics.median(self.times[-MEDIAN_STEPS:] or [figures["step_s"]])
        self.times.append(figures["step_s"])
        slow = len(self.times) > 2 and figures["step_s"] > SLOW_FACTOR * median_s
        styles = {"step": "dim", "loss": "cyan", "mfu": "green"}
        if slow:
            styles["step_s"] = "yellow"
        cells = [
            (f"{figures[c.name]:{c.format}}".rjust(c.width), styles.get(c.name, ""))
            for c in self.columns
        ]
        spaced = [part for cell in cells for part in (("  ", ""), cell)][1:]
        self._print(*spaced, overflow="crop", no_wrap=True)
        done = int(figures["step"]) + 1
        per_step_s = (time.monotonic() - self.phase_start) / max(1, done - self.first_step)
        left = f"{clock(per_step_s * (total - done))} left"
        task = self.live.task_ids[0]
        self.live.update(task, completed=done, count=f"{done}/{total}", left=left)

    def summary(self, parts: Parts) -> None:
        """Shows the summary of the run."""
        for label, text in lines(parts, self.console.width):
            self._print((label, "dim" if text else "bold"), (text, ""), soft_wrap=True)
        self.console.print()

    def losses(self, training: Mapping[int, float], held_out: Mapping[int, float]) -> None:
        """Shows a chart of the losses by step, if there are many and all are finite."""
        values = (*training.values(), *held_out.values())
        if len(training) < MIN_CHART or not all(map(math.isfinite, values)):
            return
        width = min(self.console.width, MAX_CHART)
        for text in chart({".": training, "o": held_out}, "step", "loss", width):
            self._print((text, ""), soft_wrap=True)
        if held_out:
            self._print(("o: held-out data", "dim"))
        self.console.print()

    def stop(self) -> None:
        """Removes the progress bar; lines stay."""
        self.live.stop()


def fitting_columns(figures: Mapping[str, float], width: int) -> list[Column]:
    """The columns of a step's figures, as many as fit into the terminal's width."""
    columns, used = [], 0
    redundant = {"tokens_per_s"} if "tokens_per_s_per_gpu" in figures else set()
    for column in (c for c in COLUMNS if c.name in figures.keys() - redundant):
        used += column.width + 2
        if used - 2 <= width:
            columns.append(column)
    return columns


def clock(seconds: float) -> str:
    """'1:02:03', or '2:03' below an hour."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def summary_parts(result: Mapping) -> Parts:
    """The summary of a run in two parts, from its result.json.

    Figures without a meaning on the device are left out, as TFLOP/s per GPU on a CPU.
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
        if (wait_s := result.get("data_wait_s", 0)) > DATA_WAIT * s["mean"]:
            share = f"{wait_s:.3f} s of a step, {wait_s / s['mean']:.0%} of it"
            measured["  waits for data"] = f"{share}: the host reads them too slowly"
        rates = (f"{v:.2f} ({c})" for c, v in result["tflops_per_gpu"].items())
        measured |= {"TFLOP/s per GPU": ", ".join(rates)} if gpu else {}
    if loss := result.get("loss"):
        (a, x), (b, y) = loss["first"], loss["last"]
        measured["loss"] = f"{x:.4f} at step {a}, {y:.4f} at step {b}"
        if floor := result.get("loss_floor"):
            measured["  floor"] = f"{floor:.4f}, the entropy of its data"
    if evaluations := result.get("evaluations"):
        measured |= evaluated(result, evaluations[-1])
    if "peak_bytes" in result:
        label = "peak memory per GPU" if gpu else "peak memory, process"
        measured[label] = size(result["peak_bytes"])
    if "start_to_first_step_s" in result:
        start, compiled = result["start_to_first_step_s"], result["compile_s"]
        measured["start to first step"] = f"{start:.1f} s (compile {compiled:.1f} s)"
    return {"measured": measured, "how it compares": compared(result)}


def evaluated(result: Mapping, last: Mapping) -> dict[str, str]:
    """The last evaluation, and steps, tokens and seconds to the target loss, if there is one."""
    rows = {"held-out loss": f"{last['loss']:.4f} after step {last['step']}"}
    if target := result["run"]["train"].get("target_loss"):
        e = result.get("target_reached")
        rows[f"  target {target:g}"] = (
            f"reached after {e['step'] + 1} steps, {e['tokens']:,} tokens, {e['elapsed_s']:.1f} s"
            if e
            else "not reached"
        )
    return rows


def compared(result: Mapping) -> dict[str, str]:
    """The run compared with the device's peak, published figures, and its hosts with each other."""
    rows: dict[str, str] = {}
    if mfu := {c: v for c, v in result.get("mfu", {}).items() if v is not None}:
        dtype = result["run"]["precision"]["dtype"]
        shares = ", ".join(f"{v:.2%} ({c})" for c, v in mfu.items())
        rows |= {f"MFU against the {dtype} peak": shares}
        rows |= {"days to 1T tokens": f"{result['days_to_1t_tokens']:,.2f}"}
    if names := ",".join(result.get("slow_hosts", ())):
        rows["slow hosts"] = f"{names}; to exclude them: EXCLUDE_NODES={names}"
    if row := result.get("published"):
        figure = f"{row['step_s']} s on {row['gpus']}, {row['source']}: " if "step_s" in row else ""
        rows["published"] = figure + row["verdict"]
    return rows or {"published": "no step was measured"}


def text(parts: Parts) -> str:
    """Parts as text, as wide as the terminal if stdout is one."""
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return "\n".join(label + part for label, part in [*lines(parts, columns)][1:])


def summary(parts: Parts) -> str:
    """summary_parts() as text, with one line per label."""
    return "\n".join(label + text for label, text in lines(parts))


def lines(parts: Parts, width: int | None = None) -> Iterator[tuple[str, str]]:
    """summary_parts() as lines of at most `width` columns: padded labels and parts of texts."""
    label_width = 2 + max(len(label) for rows in parts.values() for label in rows)
    for title, rows in parts.items():
        yield from (("", ""), (title, ""))
        for label, text in rows.items():
            text_width = max(width, MIN_WIDTH) - label_width if width else len(text) + 1
            for part in folded(text, text_width):
                yield f"{label:<{label_width}}", part
                label = ""


def folded(text: str, width: int) -> list[str]:
    """Text in lines of at most `width` columns, broken at spaces, after _ or /, or anywhere."""
    breakable = text.replace("_", "_\0").replace("/", "/\0")
    if all(len(word) <= width for word in text.split()):
        return textwrap.wrap(text, width, break_on_hyphens=False) or [""]
    lines = [""]
    for fragment in breakable.replace(" ", " \0").split("\0"):
        if len(lines[-1]) + len(fragment.rstrip()) > width and lines[-1]:
            lines.append("")
        lines[-1] += fragment
    broken = (line[i : i + width] for line in lines for i in range(0, max(1, len(line)), width))
    return [line.rstrip() for line in broken]
