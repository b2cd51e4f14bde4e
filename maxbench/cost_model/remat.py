"""Rematerialization policies of a run: the activations they save, and the FLOPs they cost."""

import math

from maxbench.config import resolve
from maxbench.config.run import REMATS, TENSORS, Run
from maxbench.cost_model.memory import activation_bytes


def recomputed_fraction(run: Run, remat: str = "") -> float:
    """Fraction of a layer's forward FLOPs that the backward pass recomputes.

    Args:
      remat: a policy in place of the run's own, in all layers.
    """
    m, seq = run.model, run.train.seq
    saved = REMATS[remat] if remat else run.train.saved
    again, total = 0.0, 0.0
    for n, layer in m.kinds:
        for _, sublayer in layer.parts():
            products = sublayer.gemms | {"scores": sublayer.scores(seq)}
            lost = (t for t in layer.saved(sublayer, run) if t.name not in saved)
            again += n * sum(products[path] for path in {p for t in lost for p in t.recompute})
            total += n * sum(products.values())
    layers = 1 if remat else run.train.remat_layers / m.layers
    return layers * again / total


def with_remat(run: Run, remat: str, offload: str = "", layers: int | None = None) -> Run:
    """The run with another policy, offloaded tensors, and number of layers (None: all)."""
    train = {"remat": remat, "offload": offload, "remat_layers": layers}
    same = all(getattr(run.config.train, name) == value for name, value in train.items())
    return run if same else resolve.changed(run, train=train)


def policies(run: Run, max_bytes: float = math.inf) -> list[Run]:
    """The run with each policy whose stash has at most `max_bytes`, the largest stash first."""
    return [with_remat(run, remat) for remat in _fitting(run, max_bytes)]


def _fitting(run: Run, max_bytes: float) -> list[str]:
    """Names of policies()."""
    tensors = (t for _, x in run.model.kinds for _, part in x.parts() for t in x.saved(part, run))
    has_latents = any(t.name == "latent" for t in tensors)
    differs_from_none = {
        "save_gemms_only": run.train.unrolled,
        "save_gemms_recompute_mla_up": has_latents,
        "save_gemms_recompute_mla_up_and_mlp": has_latents,
        "save_gemms_recompute_act": "mlp_act" in run.saved_on_device(TENSORS),
    }
    names = [remat for remat in REMATS if differs_from_none.get(remat, True)]
    size = {remat: activation_bytes(run, remat) for remat in names}
    fitting = [remat for remat in size if size[remat] <= max_bytes]
    return sorted(fitting, key=size.__getitem__, reverse=True)


def least_recomputed(run: Run, max_bytes: float) -> Run | None:
    """The policy that recomputes least, of those with at most `max_bytes`; the largest stash of
    equal ones. None: no policy fits."""
    best, least = None, math.inf
    for remat in _fitting(run, max_bytes):
        if (share := recomputed_fraction(run, remat)) < least:
            best, least = remat, share
        if not share:
            break
    return None if best is None else with_remat(run, best)


def with_fewer_layers(run: Run, max_bytes: float) -> Run:
    """The run with its policy in as few layers as `max_bytes` more of activations allow."""
    layers, policy = run.model.layers, run.train.remat
    one_less = with_remat(run, policy, layers=layers - 1)
    per_layer = activation_bytes(one_less) - activation_bytes(run)
    less = int(max_bytes / per_layer) if per_layer > 0 else 0
    return with_remat(run, policy, layers=max(1, layers - less)) if less else run


def offloaded(run: Run, max_bytes: float) -> Run | None:
    """The run without recomputation that offloads the fewest tensors, largest first, so that at
    most `max_bytes` stay on the GPU. None in a pipeline, or if the rest is larger."""
    if run.layout.pp > 1:
        return None
    offload = lambda names: with_remat(run, "none", ",".join(names))
    # The tensor that leaves least on the GPU is the largest.
    names = sorted(REMATS["none"], key=lambda name: activation_bytes(offload([name])))
    candidates = (offload(names[: i + 1]) for i in range(len(names)))
    return next((c for c in candidates if activation_bytes(c) <= max_bytes), None)
