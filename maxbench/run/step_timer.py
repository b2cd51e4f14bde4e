"""Step times, from completion to completion, while the next step is already dispatched."""

import math
import threading
import time
from concurrent import futures

import jax

from maxbench.run import process_stats
from maxbench.run.log_writer import Log


class RunFailed(Exception):
    """A run that must not continue; the message is the reason."""


class StepTimer:
    """Records each dispatched step when it completes.

    A thread waits for the steps in their order. The main thread cannot: on a GPU, whose launch
    queue is short, the call that dispatches a step may return only near the end of that step.
    """

    def __init__(self, log: Log):
        self.log, self.device = log, jax.local_devices()[0]
        self.thread = futures.ThreadPoolExecutor(1)
        self.newest = self.thread.submit(lambda: None)
        self.last_end = time.perf_counter()
        self.recording, self.stopped = threading.Lock(), False

    def add(
        self,
        step: int,
        metrics: dict[str, jax.Array],
        waited: tuple[float, float] | None = None,
    ) -> None:
        """Adds a dispatched step with its metrics; returns once the step before is recorded.

        Args:
          waited: when the main thread began and ended to wait for a batch from files, in
            time.perf_counter(). The devices waited from the end of the step before, at most.

        Raises:
          RunFailed: the loss or gradient norm of the step before is not finite, or experts of it
            received more rows than fit.
        """
        previous = self.newest
        self.newest = self.thread.submit(self._record, previous, step, metrics, waited)
        previous.result()

    def drain(self) -> None:
        """Waits until all steps are recorded.

        Raises:
          RunFailed: as add().
        """
        self.newest.result()

    def stop(self) -> None:
        """Records no later step, and waits until one that is being recorded is."""
        with self.recording:
            self.stopped = True

    def restart(self) -> None:
        """Starts the next step's time now; call after drain()."""
        self.last_end = time.perf_counter()

    def _record(
        self,
        previous: futures.Future,
        step: int,
        metrics: dict[str, jax.Array],
        waited: tuple[float, float] | None,
    ) -> None:
        previous.result()  # raises after a failed step, so that no later one is recorded
        jax.block_until_ready(metrics)
        end = time.perf_counter()
        values = {name: float(x) for name, x in metrics.items()}
        if waited:
            asked, ready = waited
            values["data_wait_s"] = max(0.0, ready - max(asked, self.last_end))
        step_s, self.last_end = end - self.last_end, end
        with self.recording:
            if self.stopped:
                return
            if not self.log.times:
                self.log.result.start_to_first_step_s = process_stats.since_start_s()
            self.log.step(step, step_s, values, process_stats.memory_use(self.device))
        if self.log.result.mocked:  # mocked collectives leave their outputs unwritten
            return
        for name in ("loss", "grad_norm"):
            if not math.isfinite(values[name]):
                raise RunFailed(f"{name} is {values[name]} at step {step}: later steps are void")
        if rows := values.get("lost_rows"):
            raise RunFailed(
                f"experts received {rows:.0f} rows too many at step {step} for model."
                f"dispatch_factor={self.log.run.model.dispatch_factor}, and left them out; use a "
                "larger factor, or 0 for any routing"
            )
