"""Tags of scalars that programs write to TensorBoard and Weights & Biases, and their fields."""

import re
from collections.abc import Iterable

# Tag -> field of a step (step_series.StepSeries), and the factor to its unit.
TAGS: dict[str, tuple[str, float]] = {
    # Megatron-LM, Megatron-Bridge, Megatron-DeepSpeed
    "iteration-time": ("step_s", 1.0),
    "throughput": ("tflops", 1.0),
    "throughput/tflops/device": ("tflops", 1.0),
    "lm loss": ("loss", 1.0),
    "grad-norm": ("grad_norm", 1.0),
    "batch-size": ("gbs", 1.0),
    "world-size": ("gpus", 1.0),
    "mem-max-allocated-bytes": ("peak", 1.0),
    # NeMo
    "train_step_timing in s": ("step_s", 1.0),
    "tflops_per_gpu": ("tflops", 1.0),
    "reduced_train_loss": ("loss", 1.0),
    "grad_norm": ("grad_norm", 1.0),
    "global_batch_size": ("gbs", 1.0),
    "consumed_samples": ("samples", 1.0),
    "peak_memory_usage": ("peak", 1.0),
    # MaxText
    "perf/step_time_seconds": ("step_s", 1.0),
    "perf/per_device_tflops_per_sec": ("tflops", 1.0),
    "perf/per_device_tokens_per_sec": ("tokens_s", 1.0),
    "learning/loss": ("loss", 1.0),
    "learning/grad_norm": ("grad_norm", 1.0),
    "learning/total_weights": ("tokens", 1.0),
    # torchtitan
    "time_metrics/end_to_end(s)": ("step_s", 1.0),
    "throughput(tps)": ("tokens_s", 1.0),
    "tflops": ("tflops", 1.0),
    "loss_metrics/global_avg_loss": ("loss", 1.0),
    "memory/max_reserved(gib)": ("peak", float(2**30)),
    # levanter
    "throughput/duration": ("step_s", 1.0),
    "throughput/tokens_per_second": ("all_tokens_s", 1.0),
    # GPT-NeoX
    "runtime/iteration_time": ("step_s", 1.0),
    "runtime/samples_per_sec": ("samples_s", 1.0),
    "runtime/tokens_per_sec": ("all_tokens_s", 1.0),
    "runtime/flops_per_sec_per_gpu": ("tflops", 1e-12),
    "train/lm_loss": ("loss", 1.0),
    # others
    "loss": ("loss", 1.0),
    "train/loss": ("loss", 1.0),
    "train_loss": ("loss", 1.0),
    "train/train_loss": ("loss", 1.0),
    "train/samples/train_loss": ("loss", 1.0),
    "train/grad_norm": ("grad_norm", 1.0),
    "step_s": ("step_s", 1.0),
}
# A step time of any program: 'train/step_time', 'iter_time_ms', 'time/step (s)'.
_STEP_TIME = re.compile(
    r"(?:^|[/._ -])(?:train[_-])?(?:(?:step|iter|iteration|batch)[_ -]?(?:time|timing|duration)"
    r"|(?:time|seconds|sec)[_ /-]?per[_ /-]?(?:step|iter|iteration)|time/(?:step|iter|iteration))"
    r"(?:[_ ]?(?:in )?[\[(]?(?P<unit>ms|milliseconds|s|sec|secs|seconds)[\])]?)?$"
)
# Tags as they are in names of files: TensorBoard's download of perf/step_time_seconds has
# perf_step_time_seconds in its name.
_file_name = lambda tag: re.sub(r"[^a-z0-9]+", "_", tag)
_IN_FILE_NAMES = {_file_name(tag): field for tag, field in TAGS.items()}
_VALIDATION = re.compile(r"(?:^|[/_ -])(?:val|valid|validation|eval|test)(?:[/_ -]|$)")


def field_of(tag: str) -> tuple[str, float] | None:
    """The field of a tag, and the factor to its unit; None if the tag is of another quantity."""
    name = tag.strip().lower()
    if known := TAGS.get(name) or _IN_FILE_NAMES.get(_file_name(name)):
        return known
    if _VALIDATION.search(name):
        return None
    if match := _STEP_TIME.search(name):
        return "step_s", 1e-3 if (match["unit"] or "").startswith("m") else 1.0
    return None


def is_evaluation(tag: str) -> bool:
    """Whether a tag is of an evaluation: validation/loss, eval_loss."""
    return bool(_VALIDATION.search(tag.strip().lower()))


def fields_of(tags: Iterable[str]) -> dict[str, tuple[str, float]]:
    """Tag -> field and factor; of several tags of a field, the one that comes first in TAGS."""
    order = [*TAGS]
    rank = lambda tag: order.index(tag.lower()) if tag.lower() in TAGS else len(order)
    found: dict[str, tuple[str, float]] = {}
    taken: set[str] = set()
    for tag in sorted(tags, key=lambda tag: (rank(tag), tag)):
        if (field := field_of(tag)) and field[0] not in taken:
            taken.add(field[0])
            found[tag] = field
    return found


def has_step_time(tags: Iterable[str]) -> bool:
    """Whether the tags have a step time, or a rate from which it may follow."""
    timed = {"step_s", "tokens_s", "samples_s", "all_tokens_s"}
    return any(field[0] in timed for field in fields_of(tags).values())
