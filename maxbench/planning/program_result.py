"""Results of plans of programs that anyone wrote: `maxbench plan --program`, --hlo and --maxtext,
maxbench.plan_program() and search_program()."""

import concurrent.futures
import dataclasses
import functools
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from maxbench.config import command_line, gpu_files
from maxbench.config.errors import UserError, check_choice
from maxbench.config.options import Cluster as ClusterOptions
from maxbench.config.options import ProgramOptions
from maxbench.cost_model import compile_cache, hlo_files
from maxbench.cost_model.memory import GIB
from maxbench.hardware.gpus import Gpu
from maxbench.host import environment
from maxbench.planning import drawings, plan_text, programs, results, svg
from maxbench.planning.programs import Cluster, ProgramPlan
from maxbench.terminal import console

GIVE = "give what is known: --trip_count NAME=8, --branch NAME=0.1,0.9, --price NAME=1.2e-3"
MAX_AT_A_TIME = 4  # programs: compiling one takes up to 3 GiB
SCALES = (0.25, 0.5, 1, 2, 4)  # numbers of GPUs over those of the plan, in scaling


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class ProgramResult(results.Result[ProgramPlan]):
    """Plans of a program. Prints as one screen; in a notebook as tables.

    Attributes:
      failures: layout of a search, or number of GPUs of scaling -> why it has no plan.
      points: number of GPUs -> plan of the program on it, or empty.
    """

    failures: Mapping[str, str] = dataclasses.field(default_factory=dict)
    points: Mapping[int, ProgramPlan] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def figures(self) -> dict[str, Any]:
        """The best plan as plain data; seconds and bytes unless a name has another unit."""
        scaling = [self.record(p) for p in self.points.values()]
        more = {"scaling": scaling, "failures": dict(self.failures)}
        return super().figures | {k: v for k, v in more.items() if v}

    def record(self, p: ProgramPlan) -> dict[str, Any]:
        layout = p.name if p.layout else ""
        return {
            "name": p.title, "gpu_type": p.gpu_type, "gpus": p.cluster.gpus, "layout": layout,
            "fits": p.fits, "step_s": p.step_s, "exposed_s": p.timeline.exposed_s,
            "hfu": p.hfu, "memory_gib": p.memory.total / GIB, "spare_gib": p.memory.spare / GIB,
        }  # fmt: skip

    def ranking(self) -> str:
        rows = [[p.text_s(p.step_s), f"{p.memory.spare / GIB:.1f}", p.name] for p in self.ranked]
        rows += [["", "", f"{layout}: {why}"] for layout, why in self.failures.items()]
        return "\n".join(console.table(["step s", "spare GiB", "layout"], rows, text=(2,)))

    def head(self) -> list[str]:
        p, t = self.best, self.best.timeline
        axes = " x ".join(f"{name} {n}" for name, n in p.cluster.axes.items() if name and n > 1)
        open_end = any(x.counted != "the longest branch" for x in t.unknown.values())
        tflops = t.flops / p.step_s / 1e12
        speed = f"{'at least ' * open_end}{p.text_s(p.step_s)} s a step, {tflops:.1f} TFLOP/s "
        speed += f"per GPU executed, {p.hfu:.1%} of the {p.peak} peak"
        fits = f"fits, {p.memory.spare / GIB:.1f} GiB spare"
        if not p.fits:
            fits = f"does not fit: {-p.memory.spare / GIB:.1f} GiB over"
        if p.estimated_memory:
            fits += "; memory is that of live buffers, without a buffer assignment"
        return [
            f"{p.name} on {p.cluster.gpus} x {p.gpu_type.upper()}",
            *filter(None, [axes]),
            "",
            fits,
            speed if p.fits else f"with enough memory: {speed}",
            self._band_line(),
        ]

    def _band_line(self) -> str:
        """'6.6 to 7.5 s in nine of ten known steps (h100 bf16, 9 programs)'."""
        b, s = self.best.band, self.best.step_s
        unit, scale = plan_text.time_unit(s)
        band = f"{console.interval(s * scale * b.low, s * scale * b.high)} {unit}"
        if not b.programs:
            return f"{band} in nine of ten {b.like}"
        text = f"{band} in nine of ten known steps ({b.like}, {b.programs} programs)"
        return text if b.validated else f"{text}; unvalidated for {self.best.gpu_type.upper()}"

    def screen(self) -> str:
        p = self.best
        unknown = plan_text.unknown_lines(p)
        if unknown:
            unknown.append(GIVE)
        compiled = [plan_text.compiled_line(p)] if p.compiled.compile_s else []
        return "\n".join([*self.head(), "", *plan_text.tables(p), *unknown, *compiled]).rstrip()

    def curves_table(self) -> str:
        if not self.points:
            return ""
        rows = [
            [f"{n:,}", p.text_s(p.step_s), p.text_s(p.timeline.exposed_s),
             f"{p.memory.spare / GIB:.1f}"]
            for n, p in self.points.items()
        ]  # fmt: skip
        lines = console.table(["GPUs", "step s", "exposed s", "spare GiB"], rows, text=())
        return "\n".join([*lines, *(f"{n} GPUs: {why}" for n, why in self.failures.items())])


def plan_factory(factory: Any, title: str, asked: ProgramOptions) -> ProgramResult:
    """The plan of a factory's program.

    Raises:
      UserError: the factory fails, or its program does not lower, compile or suit the GPUs.
    """
    (plan,) = _compiled(factory, title, asked, [{}], asked.gpus)
    if isinstance(plan, UserError):
        raise plan
    points, failures = {}, {}
    for gpus in (int(asked.gpus * scale) for scale in SCALES) if asked.scaling else ():
        if gpus < 1:
            continue
        (point,) = _compiled(factory, title, asked, [{}], gpus) if gpus != asked.gpus else (plan,)
        if isinstance(point, UserError):
            failures[str(gpus)] = str(point)
        else:
            points[gpus] = point
    return _with_more(ProgramResult(plans=[plan], points=points, failures=failures), asked)


def search(
    factory: Any, title: str, asked: ProgramOptions, layouts: Sequence[Mapping[str, Any]]
) -> ProgramResult:
    """Plans of a factory's program with each layout, compiled in parallel.

    Raises:
      UserError: no layout has a plan.
    """
    if not layouts:
        raise UserError("layouts is empty: give keywords of the factory, [{'tp': 1}, {'tp': 2}]")
    found = _compiled(factory, title, asked, layouts, asked.gpus)
    named = [*zip(layouts, found, strict=True)]
    failures = {_words(x): str(p) for x, p in named if isinstance(p, UserError)}
    plans = [p for p in found if not isinstance(p, UserError)]
    if not plans:
        layout, why = next(iter(failures.items()))
        raise UserError(f"no layout has a plan; {layout}: {why}")
    return _with_more(ProgramResult(plans=plans, searched=True, failures=failures), asked)


def plan_hlo(path: str, asked: ProgramOptions) -> ProgramResult:
    """The plan of the text of a compiled program.

    Raises:
      UserError: there is no such text, or it is of another number of GPUs.
    """
    if asked.scaling:
        raise UserError("--scaling needs a program that compiles for other GPUs: use --program")
    file = hlo_files.find(path)
    compiled, known = hlo_files.read(file)
    gpu_type, gpu = gpu_of(asked)
    cluster = Cluster(gpu_type, gpu, {"": asked.gpus})
    given = programs.given_by(asked)
    plan = programs.plan_program(file.name, compiled, cluster, given, memory_is_known=known)
    return _with_more(ProgramResult(plans=[plan]), asked)


def draw(result: ProgramResult, asked: ProgramOptions) -> list[tuple[str, pathlib.Path]]:
    """Writes the files of --scaling and --timeline: (flag, path) each."""
    written = []
    if asked.scaling:
        path = pathlib.Path(asked.scaling)
        line = {n: 1 / p.step_s for n, p in result.points.items()}
        path.write_text(svg.curves(result.best.title, {"steps/s": line}, "steps/s"))
        written.append(("scaling", path))
    if asked.timeline:
        written += [("timeline", path) for path in drawings.draw(result.best, asked.timeline)]
    return written


def _with_more(result: ProgramResult, asked: ProgramOptions) -> ProgramResult:
    """The result with what options add."""
    if asked.explain:
        result = dataclasses.replace(result, explanation=result.explain())
    if asked.sensitivity:
        result = dataclasses.replace(result, sensitivity=result.best.sensitivity())
    return result


def _compiled(
    factory: Any,
    title: str,
    asked: ProgramOptions,
    layouts: Sequence[Mapping[str, Any]],
    gpus: int,
) -> list[ProgramPlan | UserError]:
    """A plan for each layout, or why there is none. Compilation runs outside of Python's lock, so
    threads compile in parallel."""
    compile_cache.require_compiler()
    environment.compile_only_if_first()
    from maxbench.cost_model import absent_gpus, factories

    gpu_type, gpu = gpu_of(asked)
    given = programs.given_by(asked)

    def plan(layout: Mapping[str, Any]) -> ProgramPlan | UserError:
        try:
            found = factories.compile_factory(factory, devices, layout)
            cluster = Cluster(gpu_type, gpu, found.axes, found.order)
            p = programs.plan_program(title, found.compiled, cluster, given, layout)
        except UserError as error:
            return error
        if len(layouts) > 1:
            fits = "" if p.fits else ", does not fit"
            print(f"{p.name}: {p.text_s(p.step_s)} s{fits}", file=sys.stderr, flush=True)
        return p

    with absent_gpus.absent_gpus(gpu, gpus) as devices:
        if len(layouts) == 1:
            return [plan(layouts[0])]
        workers = min(len(layouts), os.cpu_count() or 1, MAX_AT_A_TIME)
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            return [*pool.map(plan, layouts)]


def gpu_of(asked: ProgramOptions) -> tuple[str, Gpu]:
    """The GPU type, with the figures that options give.

    Raises:
      UserError: there is no such type, or a figure is invalid.
    """
    known = command_line.gpu_types(asked.hardware)
    check_choice("gpu_type", asked.gpu_type, known)
    names = [field.name for field in dataclasses.fields(ClusterOptions)]
    figures = {n: getattr(asked, n) for n in names if getattr(asked, n) is not None}
    return asked.gpu_type, gpu_files.override(known, asked.gpu_type, figures)[asked.gpu_type]


def _words(layout: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in layout.items())
