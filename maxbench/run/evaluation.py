"""Evaluations: the loss of held-out sequences, between steps and in no figure of them."""

import dataclasses
import statistics
import time
from typing import Any

from maxbench.run.log_writer import Log
from maxbench.run.result import Evaluation
from maxbench.step import data, token_files, xla_options
from maxbench.step.train_step import Step


class Evaluator:
    """Evaluates states, always on the first sequences of the same files. Compiles its program.

    Args:
      step: the training step, of whose mesh and layout the evaluation is.
      files: the held-out sequences.
      count: batches of an evaluation.

    Attributes:
      began: when the first step began, in time.perf_counter().
    """

    def __init__(self, step: Step, files: token_files.Windows, count: int, log: Log):
        self.run, self.log, self.count = step.run, log, count
        # Without terms that are added to the loss to train.
        train = dataclasses.replace(step.run.train, z_loss=0.0)
        plain = Step(dataclasses.replace(step.run, train=train), step.mesh)
        self.batches = data.FromFiles(step.run, step.mesh, files, shuffled=False)
        start = time.perf_counter()
        options = xla_options.xla_options(step.platform, step.run)
        self.loss = plain.lower_loss().compile(compiler_options=options)
        self.began = time.perf_counter()
        log.line(
            f"evaluation on the first {count * step.run.layout.gbs:,} of {files.describe()}; "
            f"compiled in {self.began - start:.1f} s"
        )

    def __call__(self, state: Any, steps: int) -> bool:
        """Evaluates a state after so many steps, which are complete, and logs the loss; returns
        whether the target is reached."""
        start = time.perf_counter()
        if self.log.mllog:
            self.log.mllog.begin_evaluation(steps)
        self.batches.rewind()
        losses = [self.loss(state, next(self.batches)) for _ in range(self.count)]
        means, targets = zip(*(map(float, pair) for pair in losses), strict=True)
        loss, end = statistics.fmean(means, targets), time.perf_counter()
        target = self.run.train.target_loss
        reached = target is not None and loss <= target
        if self.log.mllog:
            self.log.mllog.end_evaluation(loss, reached)
        tokens = steps * self.run.layout.gbs * self.run.train.seq
        result = Evaluation(steps - 1, loss, tokens, end - start, end - self.began)
        self.log.evaluation(result, reached)
        return reached
