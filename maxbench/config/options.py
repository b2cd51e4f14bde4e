"""The options of every command, each described once.

A field is a flag of the command line, a keyword of the Python API with its type and docstring, a
line of the help page and of the reference, and, where launch/variables.toml names it, a variable of
the launcher. None stands for an option that is not set. There is a class per command, with its
summary and notes as docstring; the classes above these are groups that commands share.
"""

import dataclasses
import difflib
import os
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from maxbench.config import validation
from maxbench.config.errors import UserError
from maxbench.config.number_formats import DTYPES
from maxbench.config.recipes import PRESETS
from maxbench.config.run import MAX_GPUS, SECTIONS
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.hardware.networks import networks
from maxbench.host.environment import GPU_MEMORY_FRACTION

# Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 H100 (arXiv:2407.21783, 3.3.4).
MTBF_HOURS = 54 * 24 * 16_384 / 419
FORMATS = ("table", "csv", "json", "md", "html")  # of a report
PARSED = (int, float, bool, str, tuple[int, int])  # types of options
SETTINGS = {  # every setting of a run, SECTION.FIELD -> its dataclass field
    f"{section}.{name}": field
    for section, cls in SECTIONS.items()
    for name, field in cls.__dataclass_fields__.items()
}


def option(text: str, default: Any = None, **more: Any) -> Any:
    """A field of a class of options, which is not set if it is None.

    Args:
      text: the help text.
      more: constraints, as validation.field() takes them; flag=False, if there is no flag; sets=,
        as setting().
    """
    return dataclasses.field(default=default, metadata={"text": text, **more})


def setting(path: str, text: str, **more: Any) -> Any:
    """An option that sets a setting of the run, SECTION.FIELD, which has its constraints."""
    return option(text, sets=path, **{**SETTINGS[path].metadata, **more})


@typing.dataclass_transform(
    kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field,)
)
class Options:
    """Options of a command, checked when built, from typed values or the text of flags.

    Every subclass is a frozen dataclass.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field]]
    TITLE: ClassVar[str] = ""  # of a group, on help pages
    HIDDEN: ClassVar[Sequence[str]] = ()  # groups that are accepted without effect
    EXAMPLES: ClassVar[Sequence[str]] = ()
    WORDS: ClassVar[str] = ""  # what the command takes besides flags
    OWN_HELP: ClassVar[bool] = False  # its module prints the help page
    INSTEAD: ClassVar["type[Options] | None"] = (
        None  # options that the command takes in place of these
    )
    HINT: ClassVar[str] = "every setting is a flag, --name value"  # for an unexpected word

    def __init_subclass__(cls, title: str = "") -> None:
        cls.TITLE = title
        # Without methods that nothing calls: each is compiled at every start.
        dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)(cls)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value: Any = getattr(self, field.name)
            value, kind = field.default if value is None else value, type_of(field)
            if kind == Sequence[str]:
                one = isinstance(value, str | os.PathLike)
                value = tuple(map(os.fspath, [value] if one else value))
            elif "values" in field.metadata:
                value = named_values(field.name, value or {}, field.metadata["values"])
            elif value is not None and kind in PARSED and not field.metadata.get("sets"):
                value = validation.parse(field.name, kind, value, field.metadata)
            object.__setattr__(self, field.name, value)

    @classmethod
    def groups(cls) -> dict[str, dict[str, dataclasses.Field]]:
        """Flags in their order: title of a group -> name of a flag -> its field."""
        groups: dict[str, dict[str, dataclasses.Field]] = {}
        known: set[str] = set()
        for base in reversed(cls.__mro__[:-2]):
            for field in dataclasses.fields(base):
                if field.name not in known and field.metadata.get("flag", True):
                    groups.setdefault(vars(base)["TITLE"], {})[field.name] = field
                known.add(field.name)
        return groups

    @classmethod
    def flags(cls) -> dict[str, dataclasses.Field]:
        """All options that are flags."""
        return {name: field for group in cls.groups().values() for name, field in group.items()}

    @classmethod
    def taking(cls, words: Sequence[str]) -> "type[Options]":
        """This class, or INSTEAD if words have a flag that it alone has, of a source."""
        other = cls.INSTEAD
        given = {word.partition("=")[0] for word in words}
        sources = {f"--{name}" for name in vars(other).get("SOURCES", ())} if other else set()
        return other if other and given & sources else cls

    def changed(self) -> dict[str, Any]:
        """The options that are not at their defaults, by name."""
        values = {f: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {f.name: value for f, value in values.items() if value != f.default}


def named_values(option: str, given: Any, kind: Any) -> Mapping[str, Any]:
    """Values by name: a mapping, or texts NAME=VALUE as flags have them.

    Args:
      kind: type of the values, parsed from text; a tuple of floats is written 0.1,0.9.

    Raises:
      UserError: a text has another form, or a value is invalid.
    """
    if not isinstance(given, Mapping):
        texts = [given] if isinstance(given, str) else given
        if wrong := [text for text in texts if "=" not in text]:
            raise UserError(f"{option}={wrong[0]!r} must be NAME=VALUE")
        given = dict(text.rsplit("=", 1) for text in texts)
    shares = kind == tuple[float, ...]
    bounds = {"at_least": 0, "at_most": 1} if shares else {"at_least": 0}
    found = {}
    for name, value in given.items():
        text = f"{value}," if shares and isinstance(value, str) else value
        found[name] = validation.parse(f"{option}: {name}", kind, text, bounds)
        if shares and abs(sum(found[name]) - 1) > 1e-6:
            raise UserError(f"{option}: the shares of {name} must sum to 1")
    return found


def positional(command: type[Options]) -> str:
    """The name of the field that takes the words that are no flags."""
    fields = (f for f in dataclasses.fields(command) if not f.kw_only)
    return next(f.name for f in fields if "flag" in f.metadata)


def type_of(field: dataclasses.Field) -> Any:
    """The type of a field, without None."""
    return typing.get_args(field.type)[0] if isinstance(field.type, types.UnionType) else field.type


def help_line(field: dataclasses.Field) -> str:
    """The help text of an option, with its choices and its default."""
    text, default = field.metadata["text"], field.default
    if choices := [x for x in field.metadata.get("options", ()) if x]:
        text += f": {' | '.join(choices)}"
    if default in (None, "", False, dataclasses.MISSING) or "default:" in text:
        return text
    numbers = default if isinstance(default, tuple) else [default]
    shown = ",".join(f"{x:g}" if isinstance(x, float) else str(x) for x in numbers)
    return f"{text} (default: {shown})"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint at names like `name`: the same field in another section, or a close spelling."""
    known, field = list(known), name.rpartition(".")[2]
    same = [x for x in known if x.endswith(f".{field}")]
    near = same or difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {' or '.join(near)}?" if near else ""


class Workload(Options, title="workload"):
    config: str = dataclasses.field(
        kw_only=False,
        metadata={
            "text": f"workload or path of its file, with presets: NAME[:{','.join(PRESETS)}]"
        },
    )
    gpus: int | None = option(
        "take the recipe's row for this many GPUs", at_least=1, at_most=MAX_GPUS
    )
    gpu_type: str | None = setting("layout.gpu_type", "GPU type", options=tuple(GPU_TYPES))
    dtype: str | None = setting("precision.dtype", "number format", options=DTYPES)
    strong_scaling: bool = option("take the recipe's rows with a constant global batch", False)
    seq: int | None = setting("train.seq", "tokens per sequence")
    layers: int | None = setting("model.layers", "layers of the model")
    hardware: str | None = option("TOML file of further GPU types, as maxbench/hardware/gpus.toml")
    settings: Mapping[str, Any] | None = option(
        "any setting by path: {'optim.lr': 1e-3}", flag=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for path in self.settings or ():
            if path not in SETTINGS:
                raise UserError(f"unknown setting {path!r}{did_you_mean(path, SETTINGS)}")


class RunOptions(Workload, title="layout"):
    """Options that describe a run."""

    pp: int | None = setting("layout.pp", "pipeline stages")
    vp: int | None = setting("layout.vp", "virtual stages per pipeline stage")
    dp: int | None = setting("layout.dp", "data parallel with replicated weights (ZeRO-1)")
    fsdp: int | None = setting("layout.fsdp", "data parallel with sharded weights (ZeRO-3)")
    ep: int | None = setting("layout.ep", "expert parallel")
    cp: int | None = setting("layout.cp", "context parallel")
    tp: int | None = setting("layout.tp", "tensor parallel, with sequence parallelism")
    mbs: int | None = setting("layout.mbs", "sequences per microbatch of a data-parallel shard")
    gbs: int | None = setting("layout.gbs", "sequences per step over all GPUs")
    tp_overlap: bool | None = setting(
        "runtime.tp_overlap", "overlap TP collectives with kernels (default: true)"
    )


class Training(Options, title="run"):
    data: str | None = setting(
        "train.data", "uniform or bigram tokens, or the path of token files or texts"
    )
    eval_data: str | None = setting("train.eval_data", "path of held-out files, to evaluate on")
    eval_every: int | None = setting(
        "train.eval_every", "steps between evaluations (default: one after the last step)"
    )
    eval_steps: int | None = setting(
        "train.eval_steps", "batches of an evaluation (default: all of eval_data)"
    )
    target_loss: float | None = setting(
        "train.target_loss", "loss of an evaluation at which the run ends"
    )
    steps: int | None = setting("train.steps", "steps to train")
    output_dir: str | None = setting("output.dir", "folder in which experiments/ is created")
    checkpoint: bool | None = setting("output.checkpoint", "save a checkpoint at the end")
    resume: str | None = setting(
        "output.resume", "checkpoint to start from: a run's folder or a step"
    )
    wandb: bool | None = setting("output.wandb", "send metrics to Weights & Biases")
    profile: str | None = setting("profile.tool", "profile steps config.profile.start to stop")


class Processes(Options, title="devices and processes"):
    cpu_devices: int | None = setting("runtime.cpu_devices", "virtual CPU devices instead of GPUs")
    mock_gpus: int | None = setting(
        "runtime.mock_gpus", "run one GPU's share of a step on this many GPUs, without the network"
    )
    coordinator: str | None = setting(
        "runtime.coordinator", "host:port of process 0 (default: by Slurm)"
    )
    processes: int | None = setting("runtime.processes", "number of processes")
    process: int | None = setting("runtime.process", "index of this process, from 0")


class TrainOptions(Processes, Training, RunOptions):
    """Keywords of maxbench.train()."""

    show: bool = option("print the run's output, a line per step", True, flag=False)


class Train(TrainOptions, title="without training"):
    """Trains a workload on the local devices and measures it.

    Exit code: 0 done, 1 the run failed, 2 invalid input, 75 stopped by SIGTERM, 130 by Ctrl-C.
    """

    EXAMPLES = (
        "maxbench train --config llama31_8b:tiny",
        "maxbench train --config llama2_70b --fsdp 128",
        "maxbench train --config llama31_405b --gpus 512 --dry_run",
    )
    dry_run: bool = option("print what would run, and exit", False)
    json: bool = option("print the same as JSON, with every setting, and exit", False)


class Planning(Options, title="run to plan"):
    best_remat: bool = option("save as many activations as fit, recompute the rest", False)
    as_published: bool = option(
        "use the published run's remat and microbatches, even if they do not fit", False
    )
    search: bool = option("compare layouts and remat policies for the same batch and GPUs", False)
    compiled: int = option("number of layouts that a search compiles", 8, at_least=1)
    search_s: int = option("seconds after which a search stops, once a layout fits", 90, at_least=1)


class Cluster(Options, title="cluster"):
    memory_margin: float | None = option(
        "fraction of memory that stays free, as 0.05", below=GPU_MEMORY_FRACTION
    )
    network: str | None = option("network between NVLink domains", options=tuple(networks()))
    network_gbytes_per_s: float | None = option(
        "GB/s of each GPU to the network, one direction: 50 for an adapter of 400 Gb/s"
    )
    gpus_per_node: int | None = option("GPUs of a node")
    nvlink_gpus: int | None = option("GPUs of an NVLink domain: one node or several")
    nvlink_gbytes_per_s: float | None = option(
        "GB/s of each GPU's NVLink, both directions together"
    )


class TokenBudget(Options, title="token budget"):
    """Inputs of planning/budget.py."""

    tokens: float | None = option(
        "tokens to train on, as 15e12: adds days, failures, checkpoints, cost and energy", above=0
    )
    usd_per_gpu_hour: float = option("price of a GPU hour", 0.0, at_least=0)
    gpu_watts: float = option(
        "power of a GPU and its share of the server (default: of a DGX)", 0.0, at_least=0
    )
    mtbf_hours_per_gpu: float = option(
        f"GPU hours between failures (default: {MTBF_HOURS:,.0f}, of Llama 3)", MTBF_HOURS, above=0
    )
    checkpoint_s: float = option("seconds that a step waits for a checkpoint", 10.0, above=0)
    restart_s: float = option("seconds from a failure to the next step", 600.0, at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [f.name for f in dataclasses.fields(TokenBudget) if f.name in self.changed()]
        if given and self.tokens is None:
            raise UserError(f"{', '.join(given)} needs a token budget: give --tokens 15e12 too")


class PlanOptions(TokenBudget, Cluster, Planning, RunOptions, title="output"):
    """Keywords of maxbench.plan()."""

    explain: bool = option("add the longest operations, with source lines and bounds", False)
    sensitivity: bool = option(
        "add the step time with slower and faster networks, memory and GEMM", False
    )
    timeline: str | None = option("write the step's timeline to FILE.json, and drawings next to it")
    scaling: str | None = option("add the step time at up to 65,536 GPUs, and draw it as FILE.svg")


class Programs(Cluster, title="program"):
    """Options that describe the plan of any program."""

    gpu_type: str = option("GPU type, built in or of --hardware", "h100")
    gpus: int = option("number of GPUs", 0, at_least=1)
    hardware: str | None = option("TOML file of further GPU types, as maxbench/hardware/gpus.toml")
    trip_count: Mapping[str, int] = option("trips of a loop of unknown length, NAME=8", values=int)
    branch: Mapping[str, tuple[float, ...]] = option(
        "shares of a conditional's runs that its branches have, NAME=0.1,0.9",
        values=tuple[float, ...],
    )
    price: Mapping[str, float] = option(
        "seconds of a run of a kernel without a price, NAME=1.2e-3", values=float
    )

    def __post_init__(self) -> None:
        if not self.gpus:
            raise UserError("gpus is missing: on how many GPUs does the program run?")
        super().__post_init__()


class ProgramOptions(Programs, title="output"):
    """Keywords of maxbench.plan_program()."""

    explain: bool = option("add the longest operations, with source lines and bounds", False)
    sensitivity: bool = option(
        "add the step time with slower and faster networks, memory and GEMM", False
    )
    timeline: str | None = option("write the step's timeline to FILE.json, and drawings next to it")
    scaling: str | None = option(
        "add the step time on a quarter to four times the GPUs, and draw it as FILE.svg"
    )


class PlanProgram(ProgramOptions, title="any JAX program, instead of --config"):
    """Plans a program of a factory, of MaxText, or of a file that XLA wrote."""

    SOURCES: ClassVar[Sequence[str]] = ("program", "hlo", "maxtext")  # one of which is given
    program: str | None = option(
        "FILE.py:FACTORY; factory(devices) returns a jitted function and its abstract arguments"
    )
    hlo: str | None = option("text of a compiled program, or the folder of --xla_dump_to")
    maxtext: str | None = option("flags of an installed MaxText, 'model_name=llama3-70b ...'")
    json: bool = option("print the plan as JSON", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if [getattr(self, name) for name in self.SOURCES].count(None) != 2:
            raise UserError("give one of --program, --hlo and --maxtext")


class Plan(PlanOptions, title="output"):
    """Compiles a run for GPUs that need not be present, and predicts its memory and step time.

    Compiles the step that would train with XLA's GPU compiler. If the recipe has no row for this
    many GPUs, plan searches layouts with the batch per GPU of the nearest row. Exit code: 0 the run
    fits in memory, 3 it does not, 2 invalid input.
    """

    EXAMPLES = (
        "maxbench plan --config llama2_70b --gpus 128",
        "maxbench plan --config llama31_8b --gpus 8 --best_remat",
        "maxbench plan --config nemotron4_340b --gpus 128 --as_published",
        "maxbench plan --config llama31_8b --gpus 8 --explain",
        "maxbench plan --config llama31_8b --gpus 8 --timeline step.json",
        "maxbench plan --config llama31_8b --gpus 8 --search",
        "maxbench plan --config llama31_405b --gpus 512 --schedule",
        "maxbench plan --config llama31_70b --gpus 96",
        "maxbench plan --program my_step.py:factory --gpu_type h100 --gpus 128",
    )
    INSTEAD = PlanProgram
    json: bool = option("print the plan as JSON", False)
    schedule: bool = option("print the pipeline schedule, and exit", False)


class ReportLayout(Options, title="output"):
    paths: Sequence[str] = dataclasses.field(
        default=("experiments",),
        kw_only=False,
        metadata={
            "text": "folders of runs; logs, event files and CSV exports of other programs",
            "flag": False,
        },
    )
    title: str = option("heading of the HTML page", "maxbench report")
    full_names: bool = option("print paths instead of names", False)


class LogSettings(Options, title="settings of all logs that do not name them"):
    config: str = option("workload or path of its file: the model", "")
    gpus: int | None = option("number of GPUs", at_least=1)
    gpu_type: str = option("GPU type", "")
    dtype: str = option("number format", "", options=("", *DTYPES))
    seq: int | None = option("tokens per sequence", at_least=1)
    gbs: int | None = option("sequences per step over all GPUs", at_least=1)


class ReportOptions(LogSettings, ReportLayout, title="figures"):
    """Keywords of maxbench.report()."""

    suite: str = option("suite file of maxbench launch: report its runs, and PASS or FAIL", "")
    window: tuple[int, int] = option(
        "first and last step that are measured", (35, 44), at_least=0, check=validation.WINDOW
    )
    hardware: str | None = option("TOML file of further GPU types")
    format_table: str | None = option(
        "TOML file of further log formats, as maxbench/run_logs/formats.toml"
    )
    criterion: str = option(
        "least share of the published tokens/s that is PASS: by the noise of MLPerf runs, or 95 %",
        "noise", options=("noise", "exemplar"),
    )  # fmt: skip
    cost: float = option("dollars per GPU hour", 0.0, at_least=0)
    interval: float = option(
        "minutes between checkpoints (default: Daly's optimum)", 0.0, at_least=0, at_most=1e9
    )
    mtbf: float = option("hours between failures of the whole job", 24.0, above=0, at_most=1e9)


class Report(ReportOptions, title="output"):
    """Reports finished runs: tables, plots and comparisons with published figures.

    Reads folders of maxbench runs (default: experiments/); logs of twenty programs, as
    docs/reference/log_formats.md lists them, and of those in --format_table, compressed or not;
    TensorBoard event files; CSV exports. Compares NCCL calls of trace jobs with those that plan
    predicts. The HTML page shows the predicted parts of a step for runs whose program is in plan's
    cache. Exit code: 0 done, 1 no run succeeded or a suite failed, 2 invalid input.
    """

    WORDS = "PATH..."
    EXAMPLES = (
        "maxbench report experiments",
        "maxbench report --format=html --output report.html experiments",
        "maxbench report --cost 2.5 --format=csv experiments other/log-*.out",
        "maxbench report --diff RUN_A RUN_B",
        "maxbench report --suite experiments/suite_exemplar_h100_1790000000.json",
    )
    format: str = option("output format", "table", options=FORMATS)
    output: str = option("file to write instead of stdout", "")
    diff: bool = option("print the differences between two runs", False)


class TraceOptions(Options, title="trace"):
    """Keywords of maxbench.trace()."""

    paths: Sequence[str] = dataclasses.field(
        default=(),
        kw_only=False,
        metadata={"text": "profiles, folders of ranks, folders of runs", "flag": False},
    )
    hlo: str | None = option(
        "text of the compiled program, or the folder of --xla_dump_to: adds work and prediction of "
        "each operation (default: of the run's folder)"
    )
    gpu_type: str = option("GPU type of datasheet and prediction (default: by the device)", "")
    hardware: str | None = option("TOML file of further GPU types, as maxbench/hardware/gpus.toml")


class Trace(TraceOptions, title="output"):
    """Reads profiles and says where their measured steps went.

    Reads XPlane (.xplane.pb) of any JAX program, Kineto's Chrome JSON (.json, .json.gz) of PyTorch,
    and the SQLite export of Nsight Systems; its reports (.nsys-rep) where nsys is installed. PATH
    is a file, a folder with a file per rank, or the folder of a run.
    """

    WORDS = "PATH..."
    EXAMPLES = (
        "maxbench trace experiments/*/*",
        "maxbench trace rank0.json.gz rank1.json.gz",
        "maxbench trace --json step.xplane.pb",
    )
    json: bool = option("print the report as JSON", False)
    drawing: str | None = option("draw a measured step, and the planned one, to FILE.svg")


class Configs(Options):
    """Lists the workloads: parameters, presets, and the numbers of GPUs with recipes and published
    figures."""

    EXAMPLES = ("maxbench configs",)


class Preflight(Processes, Training, RunOptions, title="checks"):
    """Checks the nodes before step 0, in seconds.

    Accepts all flags of maxbench train, so that one line serves both. Parses XLA flags in a
    separate process; compares GPUs, driver and versions between processes; checks the health of
    each node (ECC, power limit, links, network ports, governor, disk); scores a GEMM and an
    all-reduce against their peaks; reports NCCL's transports. Exit code, the same in every process:
    0 passed, 1 failed, 2 invalid input.
    """

    HIDDEN = ("run",)
    EXAMPLES = ("maxbench preflight --config llama31_8b --gpus 8",)
    allow_tcp: bool = option("pass if NCCL falls back to TCP", False)
    numerics: bool = option(
        "also compare the gradients of each GPU and of the mesh with a CPU's, and the losses of "
        "some steps with stored ones",
        False,
    )
    json: str = option("file to write the facts and scores to", "")


class Calibrate(Processes, title="measurement"):
    """Fits the constants of plan's cost model: to the local devices, finished runs, or profiles.

    PATH is a folder of finished runs, or a result.json; two different programs on one GPU type are
    the least. With --trace, PATH is a profile as of `maxbench trace`: its kernels with known shapes
    give rates by kind and size, beside the cost model's prices. Without PATH, measures the local
    devices: one GPU measures GEMMs, attention, memory and launches; one node also its links;
    several processes also the network between nodes. A device that matches no GPU type becomes a
    new one.
    """

    WORDS = "[PATH...]"
    EXAMPLES = (
        "maxbench calibrate --write my.toml",
        "maxbench calibrate --cpu_devices 4 --write cpu.toml",
        "maxbench calibrate experiments/*/* --write my.toml",
        "maxbench calibrate --trace rank0.json.gz --write my.toml",
    )
    runs: Sequence[str] = dataclasses.field(
        default=(),
        kw_only=False,
        metadata={"text": "folders of finished runs, or profiles", "flag": False},
    )
    trace: bool = option("the paths are profiles: rates of their kernels", False)
    hlo: str | None = option("with --trace, as of `maxbench trace`: the program of the profiles")
    write: str | None = option("TOML file of the constants to write")
    gpu_type: str | None = option("GPU type of the constants (default: by the devices' name)")
    hardware: str | None = option("TOML file of further GPU types, as maxbench/hardware/gpus.toml")
    small: bool = option("use toy sizes, the default on a CPU", False)


class ClusterFile(Options):
    """Writes cluster.toml: variables of this cluster, as it reports them, and from questions on the
    terminal.

    Asks Slurm, Kubernetes or the hosts (CLUSTER_TYPE; default: by the programs on PATH) for
    account, partition or queue, GPU type, GPUs per node, networks and architecture, and writes them
    to STAGE_PATH/cluster.toml. Variables of the environment are used as they are; inside a job,
    those of the job. Values in the file are kept: to change one, edit it, or delete the file and
    run again. The file may hold any variable of launch.sh; the environment overrides it.
    """

    EXAMPLES = ("maxbench cluster",)
    HINT = "values are set as variables, GPU_TYPE=h100"


class Launch(Options, title="options"):
    """Builds the jobs of a run on a cluster from variables, and submits them."""

    OWN_HELP = True
    EXAMPLES = ("MODEL_SIZE=8b JOB_TOTAL_GPUS=8 maxbench launch --dry_run",)
    dry_run: bool = option("print the exact scripts and commands", False)
    wait: bool = option("submit, then wait for the end", False)
    file: str = option("file of jobs, submitted largest first", "")
    suite: str = option("file of jobs with expected results, or a suite's name: exemplar_h100", "")


class Folders(Options):
    WORDS = "[FOLDER...]"
    words: Sequence[str] = dataclasses.field(default=(), kw_only=False, metadata={"flag": False})


class Jobs(Folders):
    """Lists submitted jobs: state, step, seconds per step, and the reason of a wait or an end.

    FOLDER are folders of runs (default: $STAGE_PATH/experiments or ./experiments). States are those
    of squeue and sacct, of kubectl, or of the process that runs jobs by ssh; a job that its
    scheduler does not know is described by the files in its folder. Logs and results of Kubernetes
    jobs are brought into their folders.
    """

    EXAMPLES = ("maxbench jobs experiments",)


class Watch(Folders):
    """Follows one job until it ends: a line for each change of its state, step or reason.

    JOB is its number or name, as `maxbench jobs` lists it; FOLDER are folders of runs (default:
    $STAGE_PATH/experiments or ./experiments). Exit code: 0 the job completed, 1 it ended otherwise,
    130 after Ctrl-C, which does not stop the job.
    """

    WORDS = "JOB [FOLDER...]"
    EXAMPLES = ("maxbench watch 4711",)


class Cancel(Folders):
    """Ends a submitted job.

    JOB is its number or name, as `maxbench jobs` lists it; FOLDER are folders of runs (default:
    $STAGE_PATH/experiments or ./experiments). On Kubernetes its JobSet is deleted; on hosts its
    processes get SIGTERM, and save if they can.
    """

    WORDS = "JOB [FOLDER...]"
    EXAMPLES = ("maxbench cancel 4711",)


class Archive(Folders, title="options"):
    """Packs folders of runs into one file with checksums.

    Leaves out profiles and checkpoints. The archive has a SHA256SUMS, for `sha256sum -c` where it
    is unpacked.
    """

    WORDS = "FOLDER..."
    EXAMPLES = ("maxbench archive experiments --to runs.tar.gz",)
    to: str = option("file to write", "runs.tar.gz")


class Completion(Folders):
    """Prints a script that completes commands, flags and workloads in a shell.

    Add the line of the example to ~/.bashrc; with zsh, to ~/.zshrc after compinit.
    """

    WORDS = "bash|zsh"
    EXAMPLES = ('eval "$(maxbench completion bash)"',)


COMMANDS: dict[str, type[Options]] = {
    "train": Train,
    "plan": Plan,
    "report": Report,
    "trace": Trace,
    "configs": Configs,
    "preflight": Preflight,
    "calibrate": Calibrate,
    "cluster": ClusterFile,
    "launch": Launch,
    "jobs": Jobs,
    "watch": Watch,
    "cancel": Cancel,
    "archive": Archive,
    "completion": Completion,
}
# Option that describes a run -> the setting that it sets.
FLAGS = {
    field.name: field.metadata["sets"]
    for field in dataclasses.fields(TrainOptions)
    if field.metadata.get("sets")
}
