"""Processes that jax.distributed alone watches, to compare maxbench.distributed with."""

import ctypes
import functools
import os
import pathlib
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
from jax._src.lib import _jax
from jax.experimental import multihost_utils

from tests.drills import kills

LOCKED, STUCK = signal.SIGUSR1, signal.SIGUSR2
RESULT_S = 1.0  # time that a process needs after the loss of another, to write its result


class Processes:
    """Processes of a run that steps until it is stopped.

    Args:
      count: of processes.
      absent: numbers of processes that do not start.
      heartbeat_s: silence after which jax's service takes a process for dead.
      recoverable: jax_enable_recoverability.
      callback: pass jax's client a callback for errors, instead of its default, which aborts.
      first_step: of a run that resumes, which asks nothing before it.
      collectives: each step needs all processes.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        count: int = 2,
        absent: tuple[int, ...] = (),
        heartbeat_s: int = 3,
        recoverable: bool = False,
        callback: bool = False,
        first_step: int = 0,
        collectives: bool = True,
    ):
        address = kills.free_address()
        self.outputs = [folder / f"{i}.txt" for i in range(count)]
        self.processes = {}
        for i in {*range(count)} - {*absent}:
            steps = functools.partial(_train, first_step, collectives)
            options = (heartbeat_s, recoverable, callback)
            arguments = (address, count, i, str(self.outputs[i]), *options, steps)
            self.processes[i] = kills.fork_server().Process(target=_run, args=arguments)
            self.processes[i].start()

    def wait_for(self, text: str, process: int = 0, seconds: float = 60) -> str:
        """Waits until a process has printed a text; returns all that it printed."""
        end = time.monotonic() + seconds
        while text not in (printed := self.printed(process)):
            assert time.monotonic() < end, f"{text!r} is not printed: {printed}"
            time.sleep(0.05)
        return printed

    def printed(self, process: int) -> str:
        output = self.outputs[process]
        return output.read_text(errors="replace") if output.exists() else ""

    def signal(self, process: int, number: int) -> None:
        os.kill(self.processes[process].pid, number)

    def exit_code(self, process: int, seconds: float = 60) -> int | None:
        """Waits for the end of a process; None if it has not ended."""
        self.processes[process].join(seconds)
        return self.processes[process].exitcode

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()


def _run(address, count, process, output_path, heartbeat_s, recoverable, callback, train) -> None:
    file = os.open(output_path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    signal.signal(LOCKED, lambda *_: ctypes.PyDLL(None).pause())
    signal.signal(STUCK, lambda *_: signal.pause())
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_enable_recoverability", recoverable)
    if callback:
        client = functools.partial(
            _jax.get_distributed_runtime_client, missed_heartbeat_callback=print
        )
        _jax.get_distributed_runtime_client = client
    options = dict(initialization_timeout=3, heartbeat_timeout_seconds=heartbeat_s)
    jax.distributed.initialize(address, count, process, **options)
    threading.Thread(target=_print_pauses, daemon=True).start()
    print("initialized", flush=True)
    try:
        train()
    except Exception as e:
        time.sleep(RESULT_S)
        print(f"result written: {e}", flush=True)
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def _train(first_step: int, collectives: bool) -> None:
    time.sleep(3 * (first_step > 0))  # as it compiles
    mean = jax.jit(lambda x: jnp.mean(x) * jnp.ones_like(x))
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    x = jax.jit(lambda: jnp.ones(jax.device_count()), out_shardings=sharding)()
    for step in range(first_step, 1_000_000):
        if multihost_utils.reached_preemption_sync_point(step):
            print(f"stopped at step {step}", flush=True)
            return
        if collectives:
            x = jax.device_put(mean(x), sharding).block_until_ready()
        print(f"step {step}", flush=True)
        time.sleep(0.05)


def _print_pauses() -> None:
    """Prints how long Python's threads did not run."""
    last = time.monotonic()
    while True:
        time.sleep(0.1)
        now = time.monotonic()
        if now - last > 1:
            print(f"paused for {now - last:.0f} s", flush=True)
        last = now
