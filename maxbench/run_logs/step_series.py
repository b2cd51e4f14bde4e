"""Steps that a log or an export has, by program, and the run that follows from them.

A value that the log does not have is calculated where other values of the same log allow, and
RunRecord.inferred says how.
"""

import dataclasses
import itertools
import math
import statistics

from maxbench.run_logs.record import RunRecord


@dataclasses.dataclass
class StepSeries:
    """Steps of one program in one log: step -> field -> value.

    Further fields: time (of day, seconds), unreadable (a loss that is no number), and the others of
    formats.STEP_FIELDS.
    """

    means: bool = False  # whether a step time is the mean of the steps since the one before
    slowest: bool = False  # whether of several lines of a step the slowest counts
    steps: dict[int, dict[str, float]] = dataclasses.field(default_factory=dict)
    total_steps: int = 0

    def add(self, step: int, total: int, fields: dict[str, float]) -> bool:
        """Adds fields of a step; returns whether they have a time or a rate."""
        for name in ("step_s", "tokens_s", "samples_s", "all_tokens_s"):
            if name in fields and not positive(fields[name]):
                del fields[name]
        timed = fields.keys() & {"step_s", "tokens_s", "samples_s", "all_tokens_s"}
        if step < 0 or not timed:
            return False
        self.total_steps = max(self.total_steps, total)
        known = self.steps.setdefault(step, {})
        if self.slowest and "step_s" in known and "step_s" in fields:
            fields["step_s"] = max(fields["step_s"], known["step_s"])
        known.update(fields)
        return True

    def fill(self, record: RunRecord) -> None:
        """Sets the fields of a record from the steps, after set_batch()."""
        record.total_steps = max(record.total_steps, self.total_steps)
        if self.means:
            gaps = [b - a for a, b in itertools.pairwise(sorted(self.steps))]
            record.interval = statistics.mode(gaps) if gaps else 1
        self._set_step_times(record)
        for step, fields in sorted(self.steps.items()):
            if "tflops" in fields:
                record.tflops[step] = positive(fields["tflops"])
            if "loss" in fields:
                record.loss[step] = fields["loss"]
            elif fields.get("nan_steps", 0) > 0 and self._has("loss"):
                record.loss[step] = math.nan  # Megatron-LM leaves a loss out that is nan
            if "grad_norm" in fields:
                record.grad_norm[step] = fields["grad_norm"]
            record.peak_bytes = max(record.peak_bytes, int(positive(fields.get("peak", 0.0))))
        self._set_rates(record)
        if unreadable := [step for step, fields in self.steps.items() if "unreadable" in fields]:
            more = f" and in {len(unreadable) - 1} more" if len(unreadable) > 1 else ""
            record.unread.append(f"the loss of step {min(unreadable)}{more} is not a number")
        if nan_steps := sum(positive(f.get("nan_steps", 0.0)) for f in self.steps.values()):
            record.inferred.append(f"its log counts {nan_steps:.0f} iterations with a nan loss")

    def _has(self, name: str) -> bool:
        return any(name in fields for fields in self.steps.values())

    def _last(self, name: str) -> float:
        """The last positive value of a field; 0 if there is none."""
        values = (positive(self.steps[i].get(name, 0.0)) for i in sorted(self.steps, reverse=True))
        return next(filter(None, values), 0.0)

    def set_batch(self, record: RunRecord) -> None:
        """Sets gbs and tokens per step, from which step times may follow."""
        record.gbs = int(self._last("gbs")) or record.gbs
        record.tokens = int(self._last("tokens")) or record.tokens
        record.grows = len({f["gbs"] for f in self.steps.values() if "gbs" in f}) > 1
        if record.gbs:
            return
        consumed = {i: f["samples"] for i, f in self.steps.items() if positive(f.get("samples", 0))}
        if consumed:
            step = max(consumed)
            record.gbs = round(consumed[step] / (step + 1))
        rates = [f["samples_s"] * f["step_s"] for f in self.steps.values()
                 if "samples_s" in f and "step_s" in f]  # fmt: skip
        if not record.gbs and rates and max(rates) < 1e9:
            record.gbs = round(statistics.median(rates))
            record.inferred.append(f"gbs {record.gbs} is samples/s x step time")

    def _set_step_times(self, record: RunRecord) -> None:
        """Sets the step times: as logged, else from rates, else from the lines' times of day."""
        record.step_s = {i: f["step_s"] for i, f in sorted(self.steps.items()) if "step_s" in f}
        if len(record.step_s) == len(self.steps):
            return
        tokens = record.gbs * record.seq or record.tokens
        for name, work, how in (
            ("samples_s", record.gbs, "gbs over the samples/s in the log"),
            ("all_tokens_s", tokens, "tokens of a step over the tokens/s in the log"),
            ("tokens_s", tokens / record.gpus if record.gpus else 0,
             "gbs x seq over GPUs x the tokens/s of a GPU in the log"),
        ):  # fmt: skip
            if work and self._add_times(
                record, {i: work / f[name] for i, f in self.steps.items() if name in f}, how
            ):
                return
        stamps = [(i, f["time"]) for i, f in sorted(self.steps.items()) if f.get("time")]
        times = {b: (t - s) / (b - a) for (a, s), (b, t) in itertools.pairwise(stamps)}
        if self._add_times(record, times, "from the times of day of its lines"):
            first = min(self.steps)
            if first not in record.step_s and len(record.step_s) + 1 == len(self.steps):
                return
        if missing := len(self.steps) - len(record.step_s):
            record.unread.append(
                f"{missing} steps have no time: the log has no "
                f"{'gbs, seq or GPUs for its rates' if self._has_rate() else 'step time'}"
            )

    def _has_rate(self) -> bool:
        return any(self._has(name) for name in ("samples_s", "tokens_s", "all_tokens_s"))

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


def positive(number: float) -> float:
    """The number, or 0 if it is not positive and finite."""
    return number if 0 < number < 1e30 else 0.0
