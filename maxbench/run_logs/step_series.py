"""Steps that a log or an export has, by program, and the run that follows from them.

A value that the log does not have is calculated where other values of the same log allow, and
RunRecord.inferred says how.
"""

import bisect
import dataclasses
import itertools
import math
import statistics

from maxbench.run_logs.record import Origin, RunRecord

# Fields of which a step has one: its time, or a rate that its time may follow from.
TIMED = frozenset(["step_s", "tokens_s", "samples_s", "all_tokens_s"])
PAUSE = 3  # an interval between lines that is so many times the median is not of steps alone
# Tokens of a sequence. Numbers without such a divisor lack padding, as MaxText's may.
SHORTEST = 512


@dataclasses.dataclass
class StepSeries:
    """Steps of one program in one log: step -> field -> value.

    Further fields: time (of day, seconds), unreadable (a loss that is no number), rounding (of
    the step time, relative), and the others of formats.STEP_FIELDS.
    """

    means: bool = False  # whether a step time is the mean of the steps since the one before
    slowest: bool = False  # whether of several lines of a step the slowest counts
    steps: dict[int, dict[str, float]] = dataclasses.field(default_factory=dict)
    total_steps: int = 0
    evaluations: set[int] = dataclasses.field(default_factory=set)  # steps with an evaluation

    def add(self, step: int, total: int, fields: dict[str, float]) -> bool:
        """Adds fields of a step; returns whether they have a time or a rate."""
        for name in TIMED:
            if name in fields and not positive(fields[name]):
                del fields[name]
        if step < 0 or not fields.keys() & {*TIMED, "elapsed"}:
            return False
        self.total_steps = max(self.total_steps, total)
        known = self.steps.setdefault(step, {})
        if self.slowest and "step_s" in known and "step_s" in fields:
            fields["step_s"] = max(fields["step_s"], known["step_s"])
        known.update(fields)
        return True

    def drop_placeholders(self) -> None:
        """Deletes NaN that an export has where nothing was logged.

        No other field than a loss or a gradient norm can be NaN. These are, in an export that
        leaves cells empty; in another one, where as many steps in a row have NaN as there are
        from one number to the next.
        """
        kept = {(step, name) for name in ("loss", "grad_norm") for step in self._nan_steps(name)}
        for step, fields in self.steps.items():
            for name in [x for x, value in fields.items() if math.isnan(value)]:
                if (step, name) not in kept:
                    del fields[name]

    def _nan_steps(self, name: str) -> list[int]:
        """Steps at which a program logged NaN, see drop_placeholders()."""
        is_nan = lambda step: math.isnan(self.steps[step].get(name, 0.0))
        if any(name not in fields for fields in self.steps.values()):
            return [*filter(is_nan, self.steps)]
        timed = [i for i in sorted(self.steps) if any(self.steps[i].get(x, 0) > 0 for x in TIMED)]
        numbers = [place for place, step in enumerate(timed) if not is_nan(step)]
        gaps = [b - a for a, b in itertools.pairwise(numbers)]
        usual = statistics.mode(gaps) if gaps else 1
        groups = ([*group] for nan, group in itertools.groupby(timed, key=is_nan) if nan)
        return [step for group in groups if len(group) >= usual for step in group]

    def fill(self, record: RunRecord) -> None:
        """Sets the fields of a record from the steps, after set_work() and its settings."""
        record.total_steps = max(record.total_steps, self.total_steps)
        record.interval = self._interval()
        self._calculate_batch(record)
        self._set_step_times(record)
        for step, fields in sorted(self.steps.items()):
            for name, values in (("tflops", record.tflops), ("mfu", record.mfu)):
                if value := positive(fields.get(name, 0.0)):
                    values[step] = value
            if "loss" in fields:
                record.loss[step] = fields["loss"]
            elif fields.get("nan_steps", 0) > 0 and self.has("loss"):
                record.loss[step] = math.nan  # Megatron-LM leaves a loss out that is nan
            if "grad_norm" in fields:
                record.grad_norm[step] = fields["grad_norm"]
            record.peak_bytes = max(record.peak_bytes, int(positive(fields.get("peak", 0.0))))
        self._set_rates(record)
        if unreadable := [step for step, fields in self.steps.items() if "unreadable" in fields]:
            more = f" and in {len(unreadable) - 1} more" if len(unreadable) > 1 else ""
            record.unread.append(f"the loss of step {min(unreadable)}{more} is not a number")
        if rounding := max((f.get("rounding", 0.0) for f in self.steps.values()), default=0.0):
            record.inferred.append(f"step times are within {rounding:.0%}: the log rounds them")
        if nan_steps := sum(positive(f.get("nan_steps", 0.0)) for f in self.steps.values()):
            record.inferred.append(f"its log counts {nan_steps:.0f} iterations with a nan loss")

    def has(self, name: str) -> bool:
        return any(name in fields for fields in self.steps.values())

    def set_work(self, record: RunRecord) -> None:
        """Sets gbs and seq as the lines of steps have them: they win over the rest of the log."""
        for name, values, changes in (
            ("gbs", self._batches(), record.batches),
            ("seq", self._logged("seq"), record.seqs),
        ):
            if known := [value for value in values.values() if value]:
                record.learn(Origin.LOG, **{name: known[-1]})
            if len({*values.values()}) > 1:
                changes.update(self._between(values))
        tokens = self._logged("tokens")
        record.tokens = tokens if math.gcd(*tokens.values()) >= SHORTEST else {}

    def _interval(self) -> int:
        """Steps from a line to the next, whose time is a mean over them."""
        gaps = [b - a for a, b in itertools.pairwise(sorted(self.steps))] if self.means else []
        return statistics.mode(gaps) if gaps else 1

    def _logged(self, name: str) -> dict[int, int]:
        """Step -> a whole number that its line has."""
        found = ((i, int(positive(fields.get(name, 0)))) for i, fields in self.steps.items())
        return {i: value for i, value in sorted(found) if value}

    def _batches(self) -> dict[int, int]:
        """Step -> gbs as its line has it, else by the consumed samples.

        0 for a mean over steps of several batches: its line has the batch of the last one.
        """
        named, consumed = self._logged("gbs"), self._logged("samples")
        if self._interval() == 1 and named:
            return named
        pairs = itertools.pairwise(consumed)
        mean = {b: (consumed[b] - consumed[a]) / (b - a) for a, b in pairs}
        if named:
            return {i: gbs if mean.get(i, gbs) in (gbs, 0) else 0 for i, gbs in named.items()}
        if len(consumed) == 1:
            mean = {i: samples / (i + 1) for i, samples in consumed.items()}
        whole = {i: int(x) if x > 0 and x == int(x) else 0 for i, x in mean.items()}
        return whole if any(whole.values()) else {}

    def _between(self, values: dict[int, int]) -> dict[int, int]:
        """The values of all steps; one without a value has that of its neighbours if they agree."""
        order, filled = sorted(values), {}
        for step in self.steps:
            at = bisect.bisect(order, step)
            before, after = values[order[max(0, at - 1)]], values[order[min(at, len(order) - 1)]]
            filled[step] = values.get(step, before if before == after else 0)
        return filled

    def _calculate_batch(self, record: RunRecord) -> None:
        """Sets a gbs that no line has, from tokens of a step or from rates."""
        tokens, seq = record.tokens, record.seq
        if len({*tokens.values()}) > 1 and not seq:
            record.batches = dict.fromkeys(tokens, 0)
        if seq and tokens and not any(n % seq for n in tokens.values()):
            if self.has("tokens") and record.origin("seq") is Origin.LOG:
                record.gbs = 0  # lines of steps win over the rest of the log
            record.learn(Origin.LOG, gbs=tokens[max(tokens)] // seq)
            if len({*tokens.values()}) > 1:
                record.batches = self._between({i: n // seq for i, n in tokens.items()})
        rates = [f["samples_s"] * f["step_s"] for f in self.steps.values()
                 if "samples_s" in f and "step_s" in f]  # fmt: skip
        if not record.gbs and rates and max(rates) < 1e9:
            record.learn(Origin.LOG, gbs=round(statistics.median(rates)))
            record.inferred.append(f"gbs {record.gbs} is samples/s x step time")

    def _set_step_times(self, record: RunRecord) -> None:
        """Sets the step times: as logged, else from rates, else from the lines' times of day."""
        record.step_s = {i: f["step_s"] for i, f in sorted(self.steps.items()) if "step_s" in f}
        if len(record.step_s) == len(self.steps):
            return
        batch = {i: record.work(i)[0] for i in self.steps}
        tokens = {i: math.prod(record.work(i)) or record.tokens.get(i, 0) for i in self.steps}
        for name, work, gpus, how in (
            ("samples_s", batch, 1, "gbs over the samples/s in the log"),
            ("all_tokens_s", tokens, 1, "tokens of a step over the tokens/s in the log"),
            ("tokens_s", tokens, record.gpus,
             "gbs x seq over GPUs x the tokens/s of a GPU in the log"),
        ):  # fmt: skip
            rates = {i: gpus * f[name] for i, f in self.steps.items() if name in f and work[i]}
            times = {i: work[i] / rate for i, rate in rates.items() if rate}
            if self._add_times(record, times, how):
                return
        times, left_out = self._clock_times()
        source = "elapsed time" if self.has("elapsed") else "times of day"
        if self._add_times(record, times, f"from the {source} of its lines"):
            if left_out:
                intervals = f"{left_out} interval" + "s" * (left_out > 1)
                record.inferred.append(f"left out: {intervals} with an evaluation or a pause")
                return
            first = min(self.steps)
            if first not in record.step_s and len(record.step_s) + 1 == len(self.steps):
                return
        if missing := len(self.steps) - len(record.step_s):
            record.unread.append(
                f"{missing} steps have no time: the log has no "
                f"{'gbs, seq or GPUs for its rates' if self._has_rate() else 'step time'}"
            )

    def _clock_times(self) -> tuple[dict[int, float], int]:
        """Mean step times between lines, by their clocks; and how many are not of steps alone.

        An interval counts if it has no evaluation and is not PAUSE times as long as the median.
        """
        clock = "elapsed" if self.has("elapsed") else "time"
        stamps = [(i, f[clock]) for i, f in sorted(self.steps.items()) if f.get(clock)]
        # A clock of whole seconds has the same time at several steps.
        stamps = [next(same) for _, same in itertools.groupby(stamps, lambda stamp: stamp[1])]
        spans = {(a, b): (t - s) / (b - a) for (a, s), (b, t) in itertools.pairwise(stamps)}
        known = {
            (a, b): seconds for (a, b), seconds in spans.items()
            if positive(seconds) and not any(a <= i <= b for i in self.evaluations)
        }  # fmt: skip
        longest = PAUSE * statistics.median(known.values()) if known else 0.0
        times = {b: seconds for (_, b), seconds in known.items() if seconds < longest}
        return times, len(spans) - len(times)

    def _has_rate(self) -> bool:
        return any(self.has(name) for name in ("samples_s", "tokens_s", "all_tokens_s"))

    def _add_times(self, record: RunRecord, times: dict[int, float], how: str) -> bool:
        """Adds step times that are missing; returns whether there are any."""
        added = {i: t for i, t in times.items() if positive(t) and i not in record.step_s}
        record.step_s = dict(sorted({**added, **record.step_s}.items()))
        if added:
            record.inferred.append(f"step time inferred: {how}")
        return bool(added)

    def _set_rates(self, record: RunRecord) -> None:
        for step, fields in self.steps.items():
            if rate := positive(fields.get("tokens_s", 0.0)):
                record.tokens_s[step] = rate
            elif record.gpus and (rate := positive(fields.get("all_tokens_s", 0.0))):
                record.tokens_s[step] = rate / record.gpus


def several_runs(count: int) -> list[str]:
    """The note of a record of which several runs are in one log; none of a single run."""
    return [f"the log has {count} runs one after another: the last counts"] if count > 1 else []


def positive(number: float) -> float:
    """The number, or 0 if it is not positive and finite."""
    return number if 0 < number < 1e30 else 0.0
