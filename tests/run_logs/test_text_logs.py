"""Text logs of other programs: steps, and the reason of a death."""

import pytest

from maxbench.run_logs import formats, text_logs

STEPS = {
    "maxtext": (
        b"completed step: 7, seconds: 9.4, TFLOP/s/device: 400.5, total_weights: 128, loss: 2.5",
        ("maxtext", 7, 0, {"step_s": 9.4, "tflops": 400.5, "tokens": 128.0, "loss": 2.5}),
    ),
    "nemo": (
        b"Training epoch 0, iteration 7/49 | global_batch_size: 128 | global_step: 7 | "
        b"train_step_timing in s: 9.4",
        ("nemo", 7, 50, {"gbs": 128.0, "index": 7.0, "step_s": 9.4}),
    ),
    "nemo's progress bar": (
        b"| 8/50 [00:10, train_step_timing in s=9.4, consumed_samples=1024.0]",
        ("nemo", 7, 50, {"step_s": 9.4, "samples": 1024.0}),
    ),
    "megatron": (
        b" iteration        8/      50 | elapsed time per iteration (ms): 9400.0 | lm loss: 2.5 |",
        ("megatron", 7, 50, {"step_s": 9.4, "loss": 2.5}),
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_line_of_a_step_is_parsed(name):
    """All programs' steps are counted from 0."""
    line, expected = STEPS[name]
    (found,) = formats.FORMATS.find(line)
    assert (found.name, found.step, found.total, found.fields) == expected


REASONS = {
    b"": "",
    b"all is well": "",
    b"step 3\nValueError: no such thing\n": "ValueError: no such thing",
    b"RESOURCE_EXHAUSTED: Out of memory": "RESOURCE_EXHAUSTED: Out of memory",
    b"slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026 DUE TO TIME LIMIT ***": (
        "error: *** JOB 7 ON n1 CANCELLED AT 2026 DUE TO TIME LIMIT ***"
    ),
    b"srun: error: n1: task 3: Killed\nOSError: disk\n": "OSError: disk",
    b"OSError: disk\nslurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026 ***": "OSError: disk",
}


@pytest.mark.parametrize("text", REASONS)
def test_reason_of_a_death_is_the_most_informative_line(text):
    assert text_logs.death_reason(text) == REASONS[text]
