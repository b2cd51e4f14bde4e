"""Settings of a run that its log names: device names, mesh lines, dumps of the configuration.

The programs print their configuration in many shapes (`num_layers ....... 32`, `num_layers: 32`,
`"n_layers": 32`, `Config param base_num_decoder_layers: 32`); the names in KEYS are theirs.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable

from maxbench.config import recipes
from maxbench.hardware.gpus import GpuTypes
from maxbench.run_logs import log_files
from maxbench.run_logs.line_prefixes import strip_prefixes
from maxbench.run_logs.record import Origin, RunRecord

SEARCHED = 4 << 20  # bytes at the start of a log that are searched: programs dump settings there
LONGEST = 4096  # bytes of a line; longer ones are data
# Names of a whole number in a dump of the configuration -> the setting.
KEYS = {
    "layers": "num_layers num_hidden_layers n_layers base_num_decoder_layers num_decoder_layers",
    "embed": "hidden_size base_emb_dim emb_dim",
    "mlp": "ffn_hidden_size intermediate_size base_mlp_dim",
    "heads": "num_attention_heads n_heads base_num_query_heads",
    "experts": "num_experts num_moe_experts num_local_experts n_routed_experts",
    "vocab": "padded_vocab_size vocab_size",
    "seq": "seq_length max_target_length seq_len train_seq_len max_context_length",
    "gbs": "global_batch_size global_batch_size_to_train_on train_batch_size",
    "mbs": "micro_batch_size local_batch_size train_micro_batch_size_per_gpu",
    "gpus": "world_size num_gpus_total",
    "steps": "train_iters max_steps num_train_steps",
    "tp": "tensor_model_parallel_size tensor_parallel_degree model_parallel_size",
    "pp": "pipeline_model_parallel_size pipeline_parallel_degree pipe_parallel_size",
    "cp": "context_parallel_size context_parallel_degree",
    "ep": "expert_model_parallel_size expert_parallel_degree",
    "vp": "virtual_pipeline_model_parallel_size",
    "fsdp": "data_parallel_shard_degree",
}
# MaxText's mesh: each axis is the product of the degree inside a slice and that between slices.
AXES = {"data": "dp", "fsdp": "fsdp", "tensor": "tp", "pipeline": "pp", "context": "cp",
        "expert": "ep"}  # fmt: skip
LAYOUT = ("dp", "fsdp", "tp", "pp", "vp", "cp", "ep", "mbs")
_SETTING_OF = {name: setting for setting, names in KEYS.items() for name in names.split()}
_NAMES = "|".join([*_SETTING_OF, r"(?:ici|dcn)_(?:" + "|".join(AXES) + ")_parallelism"])
_IS = r'"?\s*(?:\.{3,}|[:=])\s*'  # between a name and its value
_KEY = re.compile(rf'(?<![\w.-])({_NAMES}){_IS}"?(-?\d{{1,9}})(?![\w.])'.encode())
_WORD_NAMES = (
    "model_name|flavor|gpu_type|device_kind|device_name|accelerator_type|quantization|fp8_recipe"
    "|fp8|bf16|fp16|dtype|mixed_precision_param|precision"
)
_WORDS = re.compile(rf"(?<![\w.-])({_WORD_NAMES}){_IS}[\"']?([\w .+-]{{1,60}})".encode())
_LINES = (  # sentences of the programs: torchtitan, Megatron-LM
    re.compile(rb"Building device mesh with parallelism: (?P<mesh>[^\r\n]{1,200})"),
    re.compile(
        rb"Building \d-D device mesh with [\[(](?P<axes>[^\])\r\n]{1,200})[\])], "
        rb"\[(?P<sizes>[\d, ]{1,60})\]"
    ),
    re.compile(rb"global batch size (?P<gbs>\d{1,9})"),
    re.compile(rb"sequence length (?P<seq>\d{1,9})"),
    re.compile(rb"maximum context length (?P<seq>\d{1,9})"),
    re.compile(rb"(?P<tokens>\d{1,15}) tokens per train step"),
    re.compile(rb"total steps (?P<steps>\d{1,9})"),
    re.compile(rb"Config param steps: (?P<steps>\d{1,9})"),
    re.compile(rb"using world size: (?P<gpus>\d{1,7})(?P<megatron>[^\r\n]{0,300})"),
    re.compile(rb"[Nn]um_devices: (?P<gpus>\d{1,7})"),
    re.compile(rb"world_?size[=: ]+(?P<gpus>\d{1,7})\b"),
    re.compile(rb"Starting with (?P<gpus>\d{1,7}) processes"),  # Lightning
    re.compile(rb"(?P<float8>Float8 |MXFP8 )(?P<recipe>\w*)[^\r\n]{0,60}training active"),
    re.compile(rb"(?:Swapped|Converted)[^\r\n]{0,60}\b(?P<float8>Float8|MXFP8)Linear"),
    re.compile(rb"Model (?P<model>[\w./-]{1,40} [\w.-]{1,20}) size:"),
)
_AXIS = re.compile(rb"(\w{1,20})=(\d{1,7})")
_MEGATRON_AXIS = re.compile(
    rb"\b(data|context|tensor-model|pipeline-model|expert-model)-parallel.size: (\d{1,7})"
)
# A driver's device name, to its end: 'NVIDIA A100-SXM4-40GB MIG 1g.5gb'.
_DEVICE = re.compile(
    rb"NVIDIA (?:[A-Za-z]{2,8} ){0,2}[A-Z]{1,3}\d{2,4}[A-Za-z]{0,3}\b"
    rb"(?:[ -](?:\d{1,3}GB?|HBM\w{1,2}|PCI[Ee]|NVL|SXM\d?|AC|LC|\de|MIG"
    rb"|\dg\.\d{1,3}gb|SHARED|SUPER|Ti|Ada|Laptop)\b)*"
)
# Megatron's --fp8-recipe -> the number format (config.number_formats).
_FP8_RECIPES = {"delayed": "delayed", "tensorwise": "current", "mxfp8": "mxfp8"}
# Torchtitan's names of mesh axes -> ours.
_TITAN_AXES = {"dp_replicate": "dp", "dp_shard": "fsdp", "dp": "dp", "tp": "tp", "pp": "pp",
               "cp": "cp", "ep": "ep"}  # fmt: skip
_MEGATRON_AXES = {"data": "dp", "context": "cp", "tensor-model": "tp", "pipeline-model": "pp",
                  "expert-model": "ep"}  # fmt: skip
# Text in lines that may name a setting: searching for it first is faster.
HINTS = (b"_size", b"seq_len", b"layers", b"_dim", b"_heads", b"parallel", b"NVIDIA", b"evice",
         b"training active", b"8Linear", b"fp8", b"bf16", b"fp16", b"float16", b"precision",
         b"quantization", b"odel", b"world", b"_length", b" length", b"Starting with",
         b"tokens per", b"steps", b"_iters", b"experts", b"gpu_type", b"accelerator")  # fmt: skip


@dataclasses.dataclass
class LogSettings:
    """Settings that were found so far; the first value of each counts."""

    numbers: dict[str, int] = dataclasses.field(default_factory=dict)
    words: dict[str, str] = dataclasses.field(default_factory=dict)
    devices: list[str] = dataclasses.field(default_factory=list)  # names, without repetitions

    def read_lines(self, text: bytes, marks: Iterable[bytes]) -> None:
        """Adds the settings that lines of a log name, but for those of steps: with a mark."""
        for start, end in log_files.lines_with(text, HINTS):
            for line in text[start:end].splitlines():
                if not any(mark in line for mark in marks):
                    self.read(strip_prefixes(line))

    def or_else(self, others: "LogSettings") -> "LogSettings":
        """These settings, and of others those that are unknown here."""
        numbers, words = others.numbers | self.numbers, others.words | self.words
        return LogSettings(numbers, words, self.devices or others.devices)

    def read(self, line: bytes) -> None:
        """Adds the settings that a line of a log names."""
        if len(line) > LONGEST:
            return
        for name, value in _KEY.findall(line):
            self._add_number(name.decode(), int(value))
        for name, value in _WORDS.findall(line):
            self.words.setdefault(name.decode(), value.decode().strip())
        for pattern in _LINES:
            if match := pattern.search(line):
                self._add_sentence(match.groupdict())
        for match in _DEVICE.finditer(line):
            name = match[0].decode("utf-8", "replace")
            if len(self.devices) < 8 and name not in self.devices:
                self.devices.append(name)

    def _add_number(self, name: str, value: int) -> None:
        if setting := _SETTING_OF.get(name):
            if value > 0:
                self.numbers.setdefault(setting, value)
            return
        self.numbers.setdefault(name, value)  # an axis of MaxText's mesh

    def _add_sentence(self, groups: dict[str, bytes | None]) -> None:
        for name in ("gbs", "seq", "tokens", "steps", "gpus"):
            if (text := groups.get(name)) and int(text) > 0:
                self.numbers.setdefault(name, int(text))
        if mesh := groups.get("mesh"):
            self._add_axes(_AXIS.findall(mesh), _TITAN_AXES)
        if (axes := groups.get("axes")) and (sizes := groups.get("sizes")):
            names = re.findall(rb"\w+", axes)
            self._add_axes([*zip(names, re.findall(rb"\d+", sizes), strict=False)], _TITAN_AXES)
        if text := groups.get("megatron"):
            self._add_axes(_MEGATRON_AXIS.findall(text), _MEGATRON_AXES)
        if model := groups.get("model"):
            self.words.setdefault("model", model.decode())
        if float8 := groups.get("float8"):
            self.words.setdefault("float8", float8.decode().strip())
            recipe = groups.get("recipe") or b""
            self.words["fp8_recipe"] = self.words.get("fp8_recipe") or recipe.decode()

    def _add_axes(self, pairs: list[tuple[bytes, bytes]], names: dict[str, str]) -> None:
        """Axes of a mesh; their product is the number of GPUs (experts share other axes)."""
        gpus = 1
        for name, size in pairs:
            axis = names.get(name.decode())
            if axis and 0 < int(size) < 1e7:
                self.numbers.setdefault(axis, int(size))
                gpus *= 1 if axis == "ep" else int(size)
        if names is _TITAN_AXES and pairs:
            self.numbers.setdefault("gpus", gpus)

    def apply(self, record: RunRecord, gpu_types: GpuTypes) -> None:
        """Sets the fields of a record that the log names."""
        numbers = self.numbers
        record.layout = self.layout()
        known = {name: numbers.get(name, 0) for name in ("seq", "gpus", "gbs", "layers")}
        record.learn(Origin.LOG, **known)
        record.total_steps = record.total_steps or numbers.get("steps", 0)
        self._set_gpu_type(record, gpu_types)
        self._set_model(record)
        self._set_dtype(record)

    def layout(self) -> dict[str, int]:
        """Degrees of parallelism and the microbatch, as far as the log names them."""
        layout = {name: self.numbers[name] for name in LAYOUT if name in self.numbers}
        for name, axis in AXES.items():
            sizes = [self.numbers.get(f"{kind}_{name}_parallelism", 0) for kind in ("ici", "dcn")]
            if max(sizes) > 0 and min(sizes) >= 0 and axis not in layout:  # -1: the other GPUs
                layout[axis] = max(sizes[0], 1) * max(sizes[1], 1)
        return layout

    @property
    def is_complete(self) -> bool:
        """Whether torchtitan's lines before and after those of its number format are there."""
        return "model" in self.words and "gpus" in self.numbers

    def _set_gpu_type(self, record: RunRecord, gpu_types: GpuTypes) -> None:
        named = ("gpu_type", "device_kind", "device_name", "accelerator_type")
        words = [self.words[name] for name in named if name in self.words]
        record.device = ", ".join(self.devices)
        types = {text: gpu_types.type_of(text) for text in self.devices or words}
        known = dict.fromkeys(filter(None, types.values()))
        if len(known) > 1:
            record.inferred.append(f"its log names several GPU types: {', '.join(known)}")
        elif unknown := [text for text in self.devices if not types[text]]:
            record.inferred.append(
                f"its log names {unknown[0]!r}, which is no known GPU type: --gpu_type names one "
                "that is like it, --hardware FILE adds one"
            )
        elif known:
            record.learn(Origin.LOG, gpu_type=next(iter(known)))

    def _set_model(self, record: RunRecord) -> None:
        """The workload with the dimensions in the log, else the one with the name in it."""
        numbers = self.numbers
        sizes = {key: numbers[key] for key in ("embed", "mlp", "heads") if key in numbers}
        other = numbers.get("experts", 0), numbers.get("vocab", 0)
        if len(sizes) >= 2 and (known := _workload_of(tuple(sorted(sizes.items())), *other)):
            model, size, layers = known
            record.learn(Origin.LOG, model=model, size=size, layers=layers)
            return
        name = self.words.get("model_name") or self.words.get("model", "")
        if not name and "flavor" in self.words:
            name = self.words["flavor"]
        if found := _workload_named(re.sub(r"[^a-z0-9]", "", name.lower())):
            model, size, layers = found
            record.learn(Origin.LOG, model=model, size=size, layers=layers)

    def _set_dtype(self, record: RunRecord) -> None:
        if gemms := self.words.get("gemms", "").lower():
            record.learn(Origin.LOG, dtype="bf16" if gemms == "bfloat16" else gemms)
            return
        fp8, quantized = self.words.get("fp8", ""), self.words.get("quantization", "")
        is_fp8 = re.match(r"(?i)hybrid|e4m3|true|fp8|nanoo", fp8) or "fp8" in quantized.lower()
        if is_fp8 or "float8" in self.words:
            record.learn(Origin.LOG, dtype="fp8")
            recipe = (
                "mxfp8" if self.words.get("float8") == "MXFP8" else self.words.get("fp8_recipe")
            )
            record.format = _FP8_RECIPES.get(recipe or "", "")
            return
        types = [
            self.words.get(name, "") for name in ("dtype", "mixed_precision_param", "precision")
        ]
        is_true = lambda name: re.match(r"(?i)true|1$", self.words.get(name, ""))
        named = lambda pattern: any(re.match(pattern, text) for text in types)
        if is_true("bf16") or named(r"(?i)bf16|bfloat16"):
            record.learn(Origin.LOG, dtype="bf16")
        elif is_true("fp16") or named(r"(?i)fp16|float16|16-mixed"):
            record.learn(Origin.LOG, dtype="fp16")


@functools.cache
def _workload_of(
    sizes: tuple[tuple[str, int], ...], experts: int, vocab: int
) -> tuple[str, str, int] | None:
    """Model, size and layers of the one workload with these dimensions.

    Args:
      experts: 0 or 1 for a dense model, or if the log does not name them.
      vocab: which programs pad; 0 = unknown.
    """
    models = [w.model for w in recipes.workloads().values()]
    found = [m for m in models if all(getattr(m, name) == value for name, value in sizes)]
    found = [m for m in found if (m.experts or 1) == (experts or 1)] or found
    if vocab:
        found = [m for m in found if 0.99 < vocab / m.vocab < 1.05]
    names = {(m.name, m.size, m.layers) for m in found}
    return next(iter(names)) if len(names) == 1 else None


@functools.cache
def _workload_named(text: str) -> tuple[str, str, int] | None:
    """Model, size and layers of the workload whose name is in the text: 'llama318b'."""
    plain = lambda name: re.sub(r"[^a-z0-9]", "", name.lower())
    workloads = [w.model for w in recipes.workloads().values()]
    names = {plain(f"{name}{m.size}"): m for m in workloads
             for name, model in recipes.model_names().items() if model == m.name}  # fmt: skip
    match = max((name for name in names if name in text), key=len, default="")
    return (m.name, m.size, m.layers) if match and (m := names[match]) else None
