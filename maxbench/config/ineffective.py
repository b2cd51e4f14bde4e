"""Settings that have no effect in a run.

Set by the command line, the launcher or the Python API, such a setting is refused. A workload file
may hold settings for runs of another layout or number format: the run's log names those of a file
that is not of configs/.
"""

from collections.abc import Callable, Iterable

from maxbench.config import recipes
from maxbench.config.errors import UserError
from maxbench.config.number_formats import SCALINGS
from maxbench.config.run import Run


def check_effective(run: Run, paths: Iterable[str]) -> None:
    """Checks settings that the user has set.

    Args:
      run: the resolved run.
      paths: the settings, 'section.field' each.

    Raises:
      UserError: one is not at its default and has no effect in the run; with the reason.
    """
    without_effect = reasons(run)
    for path in paths:
        if text := without_effect.get(path):
            advice = ", or leave it out" if "; use " in text else "; leave it out"
            raise UserError(f"{text}{advice}")


def reasons(run: Run) -> dict[str, str]:
    """For each setting that is not at its default and has no effect: its value and the reason."""
    texts = {}
    for path, rule in RULES.items():
        section, _, name = path.partition(".")
        asked = getattr(run.config, section)
        value, default = getattr(asked, name), asked.__dataclass_fields__[name].default
        if value != default and (reason := rule(run)):
            shown = repr(value) if isinstance(value, str) else value
            texts[path] = f"{path}={shown} has no effect: {reason}"
    return texts


def of_a_file(run: Run) -> list[str]:
    """The texts of reasons() without those of values that a file of configs/ has, which are for the
    layouts of its table."""
    size, *presets = run.model.size.split("-")
    files = [recipes.workloads()[path] for path in recipes.find_workloads(run.model.name, size)]
    parts = [part for w in files for part in (w, *(w.known[p] for p in presets if p in w.known))]
    parts += [w.fp8 for w in files if run.precision.dtype == "fp8"]

    def is_ours(path: str) -> bool:
        section, _, name = path.partition(".")
        value = getattr(getattr(run.config, section), name)
        return any(value == part.get(section, {}).get(name) for part in parts)

    return [text for path, text in reasons(run).items() if not is_ours(path)]


def _unroll_layers(run: Run) -> str:
    if run.train.unroll_layers < run.model.layers or run.train.unrolled:
        return ""  # a threshold below the number of layers requests a loop
    if run.layout.pp > 1:
        return f"pp={run.layout.pp} runs the layers of each chunk in a loop; unrolling needs pp=1"
    if run.layout.fsdp > 1:
        return (
            f"fsdp={run.layout.fsdp} runs the layers in a loop, which all-gathers the weights of "
            "one layer at a time; unrolling needs fsdp=1"
        )
    if run.train.offload:
        return "train.offload needs layers in a loop"
    return f"train.remat_layers={run.config.train.remat_layers} needs layers in a loop"


def _two_batch_overlap(run: Run) -> str:
    if not run.config.train.two_batch_overlap or run.train.two_batch_overlap:
        return ""
    return (
        "the halves of a microbatch run in turn where experts over ep have slots, mbs is even, and "
        "pp, fsdp, tp and cp are 1"
    )


def _evaluation(run: Run) -> str:
    return "" if run.train.eval_data else "there is no evaluation; use --eval_data PATH"


def _schedule(run: Run) -> str:
    return "pp=1 has no pipeline; use --pp 2 or more" if run.layout.pp == 1 else ""


def _microbatch_group_size(run: Run) -> str:
    a = run.layout
    if a.vp == 1:
        return f"pp={a.pp} and vp=1 have one model chunk per stage; use --vp 2 or more"
    given = run.config.train.microbatch_group_size
    if given is not None and given < a.pp:
        return f"it must be at least pp={a.pp}, the default"
    return ""


def _remat_layers(run: Run) -> str:
    given, layers = run.config.train.remat_layers, run.model.layers
    if given == layers:
        return ""
    if run.layout.pp > 1:
        return f"pp={run.layout.pp} applies train.remat to all layers; it needs pp=1"
    return f"the model has layers={layers}" if given is not None and given > layers else ""


def _offload(run: Run) -> str:
    return "" if run.train.saved else f"train.remat={run.train.remat} saves no tensor to offload"


def _fp8(run: Run) -> str:
    if run.format.quantized:
        return ""
    return f"dtype={run.precision.dtype} has unquantized GEMMs; use --dtype fp8"


def _scaling(run: Run) -> str:
    if not run.format.quantized or run.format.name in SCALINGS:
        return _fp8(run)
    return f"dtype={run.precision.dtype} has one scaling; use --dtype fp8"


def _history(run: Run) -> str:
    if run.format.amax_history:
        return ""
    no_history = f"scaling={run.format.name} keeps no amax history; use scaling=delayed"
    return _scaling(run) or no_history


def _profile(run: Run) -> str:
    return "" if run.profile.tool else "no steps are profiled; use --profile xplane"


def _max_to_keep(run: Run) -> str:
    o = run.output
    return "" if o.checkpoint or o.checkpoint_every else "no checkpoint is saved; use --checkpoint"


def _keep_period(run: Run) -> str:
    if run.output.checkpoint_every:
        return ""
    return "no checkpoints are saved during the run; use --config.output.checkpoint_every=N"


def _warmup_offset(run: Run) -> str:
    return "" if run.optim.warmup else "optim.warmup=0 has no warm-up steps"


def _decay_norms(run: Run) -> str:
    return "" if run.optim.weight_decay else "optim.weight_decay=0 decays no weight"


def _momentum(run: Run) -> str:
    is_muon = run.optim.name == "muon"
    return "" if is_muon else f"it is Muon's, and optim.name={run.optim.name}"


def _experts(run: Run) -> str:
    return "" if run.model.experts else f"{run.model.name} {run.model.size} has no experts"


def _capacity_factor(run: Run) -> str:
    no_limit = run.model.capacity_factor == 0  # drops no token, as force_balance does
    unused = run.model.force_balance and not no_limit
    return _experts(run) or ("model.force_balance drops no token" if unused else "")


def _drop_policy(run: Run) -> str:
    if run.model.capacity_factor:
        return _capacity_factor(run)
    return _experts(run) or "model.capacity_factor=0 drops no token"


def _dispatch_factor(run: Run) -> str:
    if run.model.has_slots:
        return _experts(run) or (
            "only dropless experts have it: model.capacity_factor=0 without force_balance"
        )
    return _experts(run) or ("ep=1 sends no token" if run.layout.ep == 1 else "")


def _ep_nodes(run: Run) -> str:
    if run.layout.ep_nodes == 1:  # the automatic value where all ep is one node, or there is no ep
        return ""
    if run.model.experts and not (run.model.has_slots or run.model.dispatch_factor):
        return "with model.dispatch_factor=0 each token is sent to all GPUs of ep"
    return _experts(run)


def _router_groups_top(run: Run) -> str:
    one_group = run.model.router_groups == 1
    return _experts(run) or ("model.router_groups=1 is one group" if one_group else "")


def _mamba(run: Run) -> str:
    mixers = {layer.mixer.kind for _, layer in run.model.kinds if layer.mixer}
    return "" if "mamba2" in mixers else f"{run.model.name} {run.model.size} has no Mamba-2 layer"


def _mtp(run: Run) -> str:
    return "" if run.model.mtp_layers else "model.mtp_layers=0 predicts the next token alone"


def _positions(run: Run) -> str:
    return "" if run.model.rope_dims else "model.rope_fraction=0 is attention without positions"


def _rope(run: Run) -> str:
    unscaled = "model.rope_factor=1 does not scale RoPE" if run.model.rope_factor == 1 else ""
    return _positions(run) or unscaled


def _llama3_rope(run: Run) -> str:
    yarn = "model.rope_scaling=yarn has rope_beta_slow and rope_beta_fast"
    return _rope(run) or (yarn if run.model.rope_scaling == "yarn" else "")


def _yarn_rope(run: Run) -> str:
    llama3 = "it is YaRN's; use --config.model.rope_scaling=yarn"
    return _rope(run) or (llama3 if run.model.rope_scaling == "llama3" else "")


def _combine(run: Run) -> str:
    return "one device has no collectives" if run.layout.gpus == 1 else ""


MAMBA = ("ssm_heads", "ssm_head_dim", "ssm_groups", "ssm_state", "ssm_conv", "ssm_chunk")
# Setting -> why it has no effect in a run, or ''.
RULES: dict[str, Callable[[Run], str]] = {
    "train.unroll_layers": _unroll_layers,
    "train.two_batch_overlap": _two_batch_overlap,
    "train.eval_every": _evaluation,
    "train.eval_steps": _evaluation,
    "train.target_loss": _evaluation,
    "train.schedule": _schedule,
    "layout.stages": _schedule,
    "layout.ep_nodes": _ep_nodes,
    "train.microbatch_group_size": _microbatch_group_size,
    "train.remat_layers": _remat_layers,
    "train.offload": _offload,
    "train.collective_combine_bytes": _combine,
    "precision.backend": _fp8,
    "precision.scaling": _scaling,
    "precision.history": _history,
    "precision.bf16_layers": _fp8,
    "profile.start": _profile,
    "profile.stop": _profile,
    "profile.ranks": _profile,
    "output.max_to_keep": _max_to_keep,
    "output.keep_period": _keep_period,
    "optim.warmup_offset": _warmup_offset,
    "optim.decay_norms": _decay_norms,
    "optim.momentum": _momentum,
    "model.quantized": _fp8,
    "model.top_k": _experts,
    "model.router": _experts,
    "model.router_bias": _experts,
    "model.router_groups": _experts,
    "model.router_groups_top": _router_groups_top,
    "model.router_scale": _experts,
    "model.expert_bias_rate": _experts,
    "model.dispatch_factor": _dispatch_factor,
    "model.force_balance": _experts,
    "model.shared_mlp": _experts,
    "model.expert_latent": _experts,
    "model.capacity_factor": _capacity_factor,
    "model.aux_loss": _experts,
    "model.drop_policy": _drop_policy,
    **{f"model.{name}": _mamba for name in MAMBA},
    "model.mtp_block": _mtp,
    "model.mtp_loss": _mtp,
    "model.rope_base": _positions,
    "model.rope_factor": _positions,
    "model.rope_scaling": _rope,
    "model.rope_context": _rope,
    "model.rope_low": _llama3_rope,
    "model.rope_high": _llama3_rope,
    "model.rope_beta_fast": _yarn_rope,
    "model.rope_beta_slow": _yarn_rope,
    "model.rope_truncate": _yarn_rope,
    "model.rope_mscale": _yarn_rope,
}
