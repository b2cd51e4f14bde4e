"""Lines of MLPerf Training's log, ':::MLLOG {...}', for its compliance checker.

Keys and their order are those of mlcommons/logging 7bbf792, mlperf_logging/mllog/constants.py and
mlperf_logging/compliance_checker/training_6.1.0 (common.yaml, closed_common.yaml,
closed_llama31_8b.yaml, closed_gpt_oss_20b.yaml).
"""

import json
import time
from collections.abc import Callable
from typing import Any

from maxbench.config.run import Run

PRECISIONS = {"bf16": "bfloat16"}  # others have the same name


def submission(run: Run, platform: str) -> dict[str, Any]:
    """Figures of the submission, by key."""
    return {
        "submission_benchmark": run.output.mllog,
        "submission_org": run.output.submitter,
        "submission_division": "closed",
        "submission_status": "onprem",
        "submission_platform": platform,
    }


def hyperparameters(run: Run, eval_samples: int) -> dict[str, Any]:
    """Batch, optimizer, schedule and layout, by key."""
    a, t, o = run.layout, run.train, run.optim
    warmup = int(o.warmup * t.steps) if 0 < o.warmup < 1 else int(o.warmup)
    return {
        "global_batch_size": a.gbs,
        "gradient_accumulation_steps": a.microbatches,
        "max_sequence_length": t.seq,
        "eval_samples": eval_samples,
        "seed": t.seed,
        "opt_name": "adamw",
        "opt_base_learning_rate": o.lr,
        "opt_end_learning_rate": o.lr_min,
        "opt_learning_rate_warmup_steps": warmup,
        "opt_learning_rate_decay_steps": t.steps - warmup - o.constant_steps,
        "opt_learning_rate_decay_schedule": "cosine with linear warmup",
        "opt_adamw_beta_1": o.b1,
        "opt_adamw_beta_2": o.b2,
        "opt_adamw_epsilon": o.eps,
        "opt_adamw_weight_decay": o.weight_decay,
        "opt_gradient_clip_norm": o.clip,
        "max_steps": t.steps,
        "tensor_parallelism": a.tp,
        "pipeline_parallelism": a.pp,
        "context_parallelism": a.cp,
        "expert_parallelism": a.ep,
        "micro_batch_size": a.mbs,
        "lowest_numerical_precision_in_linear": PRECISIONS.get(
            run.precision.dtype, run.precision.dtype
        ),
    }


class MlLog:
    """Writes the lines of a run, in the order in which its methods are called here.

    Args:
      write: writes a line.
    """

    def __init__(self, run: Run, platform: str, write: Callable[[str], None]):
        self.run, self.write, self.in_block, self.samples = run, write, False, 0
        self._event("cache_clear", True)
        self._start("init_start")
        for key, value in submission(run, platform).items():
            self._event(key, value)

    def begin(self, step: int, eval_samples: int) -> None:
        """The first step begins, of that number: the timed run, and a block of steps."""
        for key, value in hyperparameters(self.run, eval_samples).items():
            self._event(key, value)
        self._end("init_stop")
        self._start("run_start")
        self.samples = step * self.run.layout.gbs
        self._block()

    def begin_evaluation(self, steps: int) -> None:
        """An evaluation after so many steps begins."""
        self._stop_block(steps)
        self._start("eval_start", samples_count=self.samples)

    def end_evaluation(self, loss: float, reached: bool) -> None:
        """It ends; another block of steps follows, unless the run ends."""
        self._event("eval_accuracy", loss, samples_count=self.samples)
        self._end("eval_stop", samples_count=self.samples)
        if not reached and self.samples < self.run.train.steps * self.run.layout.gbs:
            self._block()

    def end(self, steps: int, reached: bool) -> None:
        """The run ends after so many steps."""
        if self.in_block:
            self._stop_block(steps)
        status = "success" if reached else "aborted"
        self._end("run_stop", status=status, samples_count=self.samples)
        self._event("train_samples", self.samples)

    def _block(self) -> None:
        self.in_block = True
        self._start("block_start", samples_count=self.samples)

    def _stop_block(self, steps: int) -> None:
        self.in_block, self.samples = False, steps * self.run.layout.gbs
        self._end("block_stop", samples_count=self.samples)

    def _event(self, key: str, value: Any, **metadata: Any) -> None:
        self._line("POINT_IN_TIME", key, value, metadata)

    def _start(self, key: str, **metadata: Any) -> None:
        self._line("INTERVAL_START", key, None, metadata)

    def _end(self, key: str, **metadata: Any) -> None:
        self._line("INTERVAL_END", key, None, metadata)

    def _line(self, event_type: str, key: str, value: Any, metadata: dict[str, Any]) -> None:
        event = {"namespace": "", "time_ms": int(time.time() * 1000), "event_type": event_type}
        event |= {"key": key, "value": value, "metadata": metadata}
        self.write(f":::MLLOG {json.dumps(event)}")
