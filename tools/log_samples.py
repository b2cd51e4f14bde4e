"""Generated logs of each program, as the formats of run_logs/formats.py describe them.

Without other settings, every log is of the same run: Llama 3.1 8B, 8 GPUs, 128 sequences of 8,192
tokens, 9.4 s a step.
"""
# Lines of logs are long.
# ruff: noqa: E501

import dataclasses
import datetime
import struct
from collections.abc import Callable, Iterable

from maxbench.run_logs import event_files

STEP_S, GBS, SEQ, GPUS = 9.4, 128, 8192, 8
DEVICE = "NVIDIA H100 80GB HBM3"
MEMORY = (
    "[Rank 0] (after 2 iterations) memory (MB) | allocated: 20000.5 | max allocated: 40960.0 | "
    "reserved: 50000.0 | max reserved: 51200.0\n"
)
SIZES = {"num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32}


@dataclasses.dataclass(frozen=True)
class Work:
    """Settings and step time of a log."""

    step_s: float = STEP_S
    gbs: int = GBS
    seq: int = SEQ
    gpus: int = GPUS
    device: str = DEVICE
    start_s: float = 60.0  # time of day of its first step
    before: int = 0  # sequences before its first step

    @property
    def tokens_s(self) -> float:
        """Tokens/s of a GPU."""
        return self.gbs * self.seq / self.gpus / self.step_s

    def rate(self, of_run: float) -> float:
        """A rate of a GPU that is proportional to tokens/s, and is `of_run` for RUN."""
        return of_run * self.tokens_s / RUN.tokens_s

    def samples(self, i: int) -> int:
        """Sequences from the start to the end of a step."""
        return self.before + self.gbs * (i + 1)

    def clock(self, i: int) -> str:
        """The time of day of a line."""
        start = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
        moment = start + datetime.timedelta(seconds=self.start_s + self.step_s * i)
        return f"{moment:%Y-%m-%d %H:%M:%S},{moment.microsecond // 1000:03}"


RUN = Work()


def dots(values: dict, prefix: str = "  ") -> str:
    """A dump of settings as Megatron's and DeepSpeed's."""
    return "".join(f"{prefix}{k} {'.' * (40 - len(k))} {v}\n" for k, v in values.items())


def nemo(steps: Iterable[int], total: int, loss: str = "11.96", of: Work = RUN) -> str:
    config = SIZES | {"seq_length": of.seq, "tensor_model_parallel_size": 1}
    head = f"[NeMo I] GPTConfig({', '.join(f'{k}={v}' for k, v in config.items())}, fp8='hybrid')\n"
    head += f"All distributed processes registered. Starting with {of.gpus} processes\n"
    return f"{head}GPU 0: {of.device}\n" + "".join(
        f"Training epoch 0, iteration {i}/{total - 1} | lr: 7.5e-06 | global_batch_size: {of.gbs} | "
        f"global_step: {i} | peak_memory_usage: 70833405952 | reduced_train_loss: {loss} | "
        f"grad_norm: 1.2 | train_step_timing in s: {of.step_s} | TFLOPS_per_GPU: {of.rate(611.2):.1f} | "
        f"consumed_samples: {of.samples(i)}\n"
        for i in steps
    )


def maxtext(steps: Iterable[int], total: int, loss: str = "2.500", of: Work = RUN) -> str:
    config = {
        "model_name": "llama3.1-8b", "global_batch_size_to_train_on": of.gbs, "steps": total,
        "max_target_length": of.seq, "ici_fsdp_parallelism": of.gpus, "dcn_fsdp_parallelism": 1,
        "dtype": "bfloat16",
    }  # fmt: skip
    head = "".join(f"I0101 Config param {k}: {v}\n" for k, v in config.items())
    head += f"I0101 Num_devices: {of.gpus}, shape (1, 1, 8, 1)\nGPU 0: {of.device}\n"
    return head + "".join(
        f"completed step: {i}, seconds: {of.step_s:.3f}, TFLOP/s/device: {of.rate(687.1):.1f}, Tokens/s/device: "
        f"{of.tokens_s:.1f}, total_weights: {of.gbs * of.seq}, loss: {loss}\n"
        for i in steps
    )


def torchtitan(steps: Iterable[int], total: int, loss: str = " 8.1000", of: Work = RUN) -> str:
    log = "[titan] {} - root - INFO - {}\n"
    head = [
        f"Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard={of.gpus // 2}, cp=1, tp=2, ep=1",
        f"CUDA capacity: {of.device} with 79.18GiB memory",
        "Model llama3 8B size: 8,030,261,248 total parameters",
        f"Trainer is initialized with local batch size 1, global batch size {of.gbs}, gradient "
        f"accumulation steps 32, sequence length {of.seq}, total steps {total} (warmup 2)",
    ]
    tps = round(of.gbs * of.seq / of.gpus / of.step_s)
    body = [
        (of.clock(i + 1), f"step: {i + 1:2}  loss: {loss}  grad_norm:  1.2000  memory: 47.55GiB"
         f"(60.05%)  tps: {tps:,}  tflops: {of.rate(714.97):.2f}  mfu: {of.rate(72.29):.2f}%")
        for i in steps
    ]  # fmt: skip
    validation = (
        of.clock(total),
        "validate step:  9  loss:  8.0  memory: 40.0GiB(50.5%)  tps: 9,000",
    )
    rows = [*((of.clock(0), text) for text in head), *body, validation]
    return "".join(f"[rank0]:{log.format(*row)}" for row in rows)


def neox(steps: Iterable[int], total: int, loss: str = "1.090000E+01", of: Work = RUN) -> str:
    config = SIZES | {"seq_length": of.seq, "train_batch_size": of.gbs, "world_size": of.gpus,
                      "model_parallel_size": 2, "pipe_parallel_size": 1, "train_iters": total,
                      "precision": "bfloat16"}  # fmt: skip
    return f"GPU 0: {of.device}\n" + dots(config) + "".join(
        f" samples/sec: {of.gbs / of.step_s:.3f} | iteration {i + 1:8d}/{total:8d} | elapsed time per "
        f"iteration (ms): {of.step_s * 1e3:.1f} | learning rate: 1.2E-05 | approx flops per GPU: "
        f"{of.rate(823.4):.1f}TFLOPS | lm_loss: {loss} | loss scale: 1.0 | number of skipped iterations:   0 | "
        f"number of nan iterations:   0 |\n{MEMORY}steps: {i + 1} loss: 10.9 "
        f"iter time (s): {of.step_s:.3f} samples/sec: {of.gbs / of.step_s:.3f}\n"
        for i in steps
    )  # fmt: skip


def megatron(
    steps: Iterable[int],
    total: int,
    loss: str = "1.196000E+01",
    of: Work = RUN,
    rate: str = "",
    mean: str = "",
    flops: str | None = None,
    end: str = "",
) -> str:
    if flops is None:
        flops = f" throughput per GPU (TFLOP/s/GPU): {of.rate(687.1):.1f} |"
    config = SIZES | {"seq_length": of.seq, "global_batch_size": of.gbs, "micro_batch_size": 1,
                      "bf16": True, "fp8": "hybrid", "train_iters": total}  # fmt: skip
    head = (
        f"using world size: {of.gpus}, data-parallel size: {of.gpus // 2}, context-parallel size: 2, "
        f"tensor-model-parallel size: 1, pipeline-model-parallel size: 1\nGPU 0: {of.device}\n"
    )
    return head + dots(config) + "".join(
        f"{rate} [{of.clock(i + 1)}] iteration {i + 1:8d}/{total:8d} | consumed samples: "
        f"{of.samples(i):12d} | elapsed time per iteration (ms): {of.step_s * 1e3:.1f}{mean} |{flops} "
        f"learning rate: 1.0E-05 | global batch size: {of.gbs:5d} | lm loss: {loss} | loss scale: 1.0 "
        f"| grad norm: 1.234 | number of skipped iterations:   0 | number of nan iterations:   0 |"
        f"{end}\n{MEMORY}"
        for i in steps
    )  # fmt: skip


def bridge(steps: Iterable[int], total: int, loss: str = "1.196000E+01", of: Work = RUN) -> str:
    rate = f"Step Time : {of.step_s:.2f}s GPU utilization: {of.rate(717.2):.1f}MODEL_TFLOP/s/GPU\n"
    return megatron(steps, total, loss, of, rate, flops="")


def megatron_deepspeed(
    steps: Iterable[int], total: int, loss: str = "1.196000E+01", of: Work = RUN
) -> str:
    end = (
        f" actual seqlen: {of.seq:5d} | samples per second: {of.gbs / of.step_s:.3f} | tokens per gpu per "
        f"second (tgs): {of.tokens_s:.1f} | TFLOPs: {of.rate(687.1):.2f} |"
    )
    return megatron(steps, total, loss, of, flops="", end=end)


def primus(steps: Iterable[int], total: int, loss: str = "1.196000E+01", of: Work = RUN) -> str:
    flops = (
        f" compute per GPU (TFLOP/s/GPU): {of.rate(687.1):.1f} (avg 650.0) | tokens/s/GPU inst/harmonic mean: "
        f"{of.tokens_s:.1f}/13200.0 |"
    )
    end = " hip mem usage/free/total/usage_ratio: 40.00GB/39.18GB/79.18GB/50.52%"
    return megatron(steps, total, loss, of, mean="/9950.1", flops=flops, end=end)


def deepspeed(steps: Iterable[int], total: int, loss: str = "10.9000", of: Work = RUN) -> str:
    config = {
        "train_batch_size": of.gbs,
        "train_micro_batch_size_per_gpu": 2,
        "world_size": of.gpus,
    }
    stamp = "[{}] [INFO] [{}] "
    head = f"GPU 0: {of.device}\n" + dots(
        config, stamp.format(of.clock(0), "config.py:1003:print") + "  "
    )
    return head + "".join(
        stamp.format(of.clock(i + 1), "timer.py:264:stop")
        + f"epoch=0/micro_step={4 * (i + 1)}/global_step={i + 1}, RunningAvgSamplesPerSec=13.1, "
        f"CurrSamplesPerSec={of.gbs / of.step_s}, MemAllocated=4.32GB, MaxMemAllocated=38.49GB\n"
        f"steps: {i + 1} loss: {loss} iter time (s): {of.step_s:.3f} samples/sec: {of.gbs / of.step_s:.3f}\n"
        for i in steps
    )


def levanter(steps: Iterable[int], total: int, loss: str = "8.12", of: Work = RUN) -> str:
    head = f"device_kind: {of.device}\nseq_len: {of.seq}\ntrain_batch_size: {of.gbs}\nworld_size: {of.gpus}\n"
    return head + "".join(
        f"{of.clock(i + 1)} - 0 - tqdm_loggable.tqdm_logging - INFO :: Progress on:train "
        f"{i + 1:.1f}it/{total:.1f}it rate:{of.step_s:.1f}s/it remaining:1:05:15 elapsed:31:40 "
        f"postfix:loss={loss}\n"
        for i in steps
    )


def nanotron(steps: Iterable[int], total: int, loss: str = "12", of: Work = RUN) -> str:
    head = (
        f"Config(parallelism=ParallelismArgs(dp={of.gpus},\n  pp=1,\n  tp=1),\n tokens=TokensArgs("
        f"sequence_length={of.seq},\n  micro_batch_size=2,\n  batch_accumulation_per_replica={of.gbs // of.gpus // 2}))\n"
        f"LlamaConfig({', '.join(f'{k}={v}' for k, v in _HF_SIZES.items())})\nGPU 0: {of.device}\n"
    )
    return head + "".join(
        f"01/01/2026 00:01:10 [INFO|DP=0]: iteration: {i + 1} / {total} | consumed_tokens: 1.05M | "
        f"time_per_iteration_ms: {of.step_s}K | tokens_per_sec_per_gpu: {of.tokens_s / 1e3:.1f}K | "
        f"global_batch_size: {of.gbs * of.seq / 1e6:.2f}M | grad_norm: 1.25 | lm_loss: {loss} | lr: 1e-05 | "
        f"model_tflops_per_gpu: {of.rate(687):.0f} | eta: 0:07:50\n"
        for i in steps
    )


_HF_SIZES = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
             "num_hidden_layers": 32}  # fmt: skip


def composer(steps: Iterable[int], total: int, loss: str = "12.0029", of: Work = RUN) -> str:
    head = f"n_gpus: {of.gpus}\nmax_seq_len: {of.seq}\nglobal_train_batch_size: {of.gbs}\nGPU 0: {of.device}\n"
    return (
        head
        + "".join(
            f"[batch={i + 1}/{total}]:\n\t Train time/batch: {i}\n"
            f"\t Train loss/train/total: {loss}\n"
            "\t Train memory/peak_allocated_mem: 42.9497\n"
            f"\t Train throughput/batches_per_sec: {1 / of.step_s:.4f}\n"
            f"\t Train throughput/device/tokens_per_sec: {of.tokens_s:.4f}\n"
            f"\t Train throughput/device/flops_per_sec: {of.rate(687.1) * 1e12:.4f}\n"
            for i in steps
        )
        + "[Eval batch=1/4] Eval on eval data:\n\t Eval throughput/batches_per_sec: 9.0\n"
    )


def olmo_core(steps: Iterable[int], total: int, loss: str = "12.003", of: Work = RUN) -> str:
    head = f"config: global_batch_size={of.gbs * of.seq}, sequence_length={of.seq}\nGPU 0: {of.device}\n"
    line = "2026-01-12 20:22:01.123\thost-0:0\tolmo_core.console_logger:52\tINFO\t"
    return head + "".join(
        f"{line}[step={i + 1}/{total},epoch=1,eta=0:05:00]\n    train/CE loss={loss}\n"
        "    optim/total grad norm=1.2\n    gpu_memory/GPU active mem (GiB)=40.00\n"
        f"    throughput/device/TPS={of.tokens_s:,.0f}\n    throughput/device/BPS={1 / of.step_s:.4f}\n"
        f"    throughput/device/BPS (actual avg)=0.1000\n"
        for i in steps
    )


def automodel(steps: Iterable[int], total: int, loss: str = "12.0000", of: Work = RUN) -> str:
    del total  # the program does not log it
    line = "2026-02-01 12:00:00 | INFO | nemo_automodel.recipes.llm.train_ft | {}\n"
    rate = of.gbs * of.seq / of.step_s
    body = "".join(
        line.format(
            f"step {i} | epoch 0 | loss {loss} | grad_norm 1.2500 | lr 1.00e-05 | mem 40.00 GiB | "
            f"tps {rate:.2f}({rate / of.gpus:.2f}/gpu) | num_label_tokens {of.gbs * of.seq}"
        )
        for i in steps
    )
    validation = '[val] name "val" | step 9 | epoch 0 | loss 9.0 | lr 1.00e-05 | num_label_tokens 9'
    return f"global_batch_size: {of.gbs}\nGPU 0: {of.device}\n" + body + line.format(validation)


def hf_trainer(steps: Iterable[int], total: int, loss: str = "12.0", of: Work = RUN) -> str:
    head = (
        "  Total train batch size (w. parallel, distributed & accumulation) = "
        f"{of.gbs}\n  Total optimization steps = {total}\nGPU 0: {of.device}\n"
        "Loading checkpoint shards: 100%|████| 4/4 [00:03<00:00,  1.30it/s]\n"
    )
    return head + "".join(
        f"\r{100 * (i + 1) // total:3}%|██   | {i + 1}/{total} [01:10<05:00,  {of.step_s:.2f}s/it]\n"
        f"{{'loss': {loss}, 'grad_norm': 1.25, 'learning_rate': 2.9e-05, 'epoch': 0.01}}\n"
        f"\r 50%|██   | 2/4 [00:01<00:01,  1.50it/s]\n{{'eval_loss': 9.1, 'epoch': 0.01}}\n"
        for i in steps
    )


def lightning(steps: Iterable[int], total: int, loss: str = "12.00", of: Work = RUN) -> str:
    head = f"All distributed processes registered. Starting with {of.gpus} processes\nGPU 0: {of.device}\n"
    seconds = lambda i: int(of.start_s - RUN.start_s + of.step_s * (i + 1))
    elapsed = lambda i: f"{seconds(i) // 60:02}:{seconds(i) % 60:02}"
    return (
        head
        + "".join(
            f"\rEpoch 0: {100 * (i + 1) // total}%|██   | {i + 1}/{total} [{elapsed(i)}<05:00, "
            f" 0.11it/s, v_num=0, train_loss={loss}]"
            for i in steps
        )
        + "\n"
    )


def litgpt(steps: Iterable[int], total: int, loss: str = "12.000", of: Work = RUN) -> str:
    del total  # the program does not log it
    head = (
        f"{{'model_name': 'Llama-3.1-8B',\n 'train': TrainArgs(global_batch_size={of.gbs})}}\n"
        f"GPU 0: {of.device}\n"
    )
    return (
        head
        + "".join(
            f"Epoch 1 | iter {i + 1} step {i + 1} | loss train: {loss}, val: n/a | iter time: "
            f"{of.step_s * 1e3:.2f} ms (step) remaining time: 0:10:12\n"
            for i in steps
        )
        + "Memory used: 42.95 GB\n"
    )


def nanogpt(steps: Iterable[int], total: int, loss: str = "12.0000", of: Work = RUN) -> str:
    del total  # the program does not log it
    head = (
        f"Overriding: block_size = {of.seq}\ntokens per iteration will be: {of.gbs * of.seq:,}\n"
        f"GPU 0: {of.device}\nstep 0: train loss 12.0, val loss 12.0\n"
    )
    return head + "".join(
        f"iter {i}: loss {loss}, time {of.step_s * 1e3:.2f}ms, mfu 12.34%\n" for i in steps
    )


def axlearn(steps: Iterable[int], total: int, loss: str = "12.0", of: Work = RUN) -> str:
    steps = [*steps]
    line = "I0101 00:00:00 1 trainer.py:424] spmd_trainer process   0 step {:8}] {}\n"
    end = (
        line.format(total, f"Reached max_step={total}. Stopping")
        if steps and steps[-1] + 9 >= total
        else ""
    )
    return (
        f"device_kind: {of.device}\n"
        + "".join(
            line.format(i + 1, f"loss={loss} aux={{}}")
            + line.format(i + 1, f"Average step time: {of.step_s} seconds")
            for i in steps
        )
        + end
    )


def mlperf(steps: Iterable[int], total: int, loss: str = "12.0", of: Work = RUN) -> str:
    form = (
        ':::MLLOG {{"namespace": "", "time_ms": 1, "event_type": "{}", "key": "{}", "value": {}, '
    )
    form += '"metadata": {{"file": "a.py", "lineno": 480{}}}}}\n'
    point = lambda key, value, more="": form.format("POINT_IN_TIME", key, value, more)
    head = "".join((
        point("submission_benchmark", '"llama31_8b"'),
        point("submission_platform", f'"1x{of.device}"'), point("global_batch_size", of.gbs),
        point("max_sequence_length", of.seq), point("max_steps", total),
        point("tensor_parallelism", 1), point("micro_batch_size", 1),
    ))  # fmt: skip
    return head + "".join(
        point(
            "tracked_stats", f'{{"train_step_time": {of.step_s}, "reduced_train_loss": {loss}}}',
            f', "step": {i}.0, "samples_count": {of.samples(i)}.0',
        )
        + point("tracked_stats", '{"validation_step_time": 0.5}', ', "step": 1, "samples_count": 9')
        for i in steps
    )  # fmt: skip


# Name of a format -> a function of (steps from 0, number of steps, text of the loss).
LOGS: dict[str, Callable[..., str]] = {
    "nemo": nemo, "maxtext": maxtext, "torchtitan": torchtitan, "neox": neox,
    "primus": primus, "megatron-deepspeed": megatron_deepspeed, "megatron-bridge": bridge,
    "megatron": megatron, "deepspeed": deepspeed, "levanter": levanter,
    "nanotron": nanotron, "composer": composer, "olmo-core": olmo_core, "automodel": automodel,
    "hf-trainer": hf_trainer, "lightning": lightning, "litgpt": litgpt, "nanogpt": nanogpt,
    "axlearn": axlearn, "mlperf": mlperf,
}  # fmt: skip


def event_file(scalars: Iterable[tuple[str, int, float]], start_s: float = 1e9) -> bytes:
    """A TensorBoard event file of (tag, step, value), from a time of day in seconds on."""
    field = lambda number, kind, data: bytes([number << 3 | kind]) + data
    sized = lambda number, data: field(number, 2, varint(len(data)) + data)
    records = [field(1, 1, struct.pack("<d", 1.0)) + sized(3, b"brain.Event:2")]
    for tag, step, value in scalars:
        scalar = sized(1, sized(1, tag.encode()) + field(2, 5, struct.pack("<f", value)))
        wall = struct.pack("<d", start_s + STEP_S * step)
        records.append(field(1, 1, wall) + field(2, 0, varint(step)) + sized(5, scalar))
    pack = lambda data: data + struct.pack("<I", event_files.crc(data))
    return b"".join(pack(struct.pack("<Q", len(data))) + pack(data) for data in records)


def varint(number: int) -> bytes:
    """A number as protocol buffers write it."""
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])
