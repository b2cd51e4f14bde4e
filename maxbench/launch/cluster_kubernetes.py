"""Variables of a Kubernetes cluster for cluster.toml, from its nodes, queues and claims."""

import collections
import contextlib
from collections.abc import Mapping
from typing import NamedTuple

from maxbench.config.errors import UserError
from maxbench.launch import kubectl, kubernetes
from maxbench.launch.cluster import Answers

GPU = "nvidia.com/gpu"
GPU_LABELS = ("nvidia.com/gpu.product", "cloud.google.com/gke-accelerator")
MACHINE = "node.kubernetes.io/instance-type"
OF_KUBERNETES = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/")  # passing taints
CLAIM_PATH = "/results"  # of the claim in the container


class NodeKind(NamedTuple):
    """A kind of nodes with GPUs."""

    gpu_type: str  # '' = unknown
    gpus: int
    machine: str
    rdma: tuple[str, ...]  # resources of NICs
    taints: tuple[str, ...]

    def __str__(self) -> str:
        texts = [f"{self.gpus} {self.gpu_type or 'GPUs'}", self.machine, *self.rdma]
        return ", ".join(filter(None, texts))


def detect(answers: Answers) -> dict[str, str]:
    """Variables of the cluster that kubectl reaches.

    Raises:
      UserError: kubectl is missing, the cluster does not answer, or a variable is invalid.
    """
    context = answers.resolve("K8S_CONTEXT", _current_context())
    client = kubectl.Client(context, answers.of_env("K8S_NAMESPACE"))
    client.check_job_sets()
    answers.resolve("K8S_NAMESPACE", {client.namespace: ""})
    kinds = _nodes(client, answers)
    usable = _resolve_gpus(answers, kinds)
    machines = {kind.machine for kind in usable}
    networks = [n for n, x in kubernetes.networks().items() if machines == {x.machine}]
    network = answers.resolve("K8S_NETWORK", dict.fromkeys(networks, ""))
    rdma = dict.fromkeys((f"{name}=1" for kind in usable for name in kind.rdma), "")
    if not network:
        answers.resolve("K8S_RESOURCES", rdma)
    taints = dict.fromkeys(taint for kind in usable for taint in kind.taints)
    if taints.keys() - {GPU}:
        answers.resolve("K8S_TOLERATIONS", {";".join({GPU: None} | taints): ""})
    answers.resolve("K8S_QUEUE", _queues(client))
    _resolve_claim(answers, client)
    answers.resolve("RUN_CONF_IMAGE", {}, needed=True)
    return answers.found


def _current_context() -> dict[str, str]:
    """The current context of kubectl, or all of them."""
    current, _ = kubectl.Client("", "").run("config", "current-context")
    if name := current.strip():
        return {name: ""}
    names, _ = kubectl.Client("", "").run("config", "get-contexts", "-o", "name")
    return dict.fromkeys(names.split(), "")


def _nodes(client: kubectl.Client, answers: Answers) -> collections.Counter[NodeKind]:
    """Number of nodes of each kind; empty if they must not be listed.

    Raises:
      UserError: no node has GPUs.
    """
    items, why = client.get("nodes")
    if why:
        print(f"note: the nodes cannot be listed: {why}")
        return collections.Counter()
    found: collections.Counter[NodeKind] = collections.Counter()
    for item in items:
        labels = item["metadata"].get("labels", {})
        resources = item.get("status", {}).get("allocatable", {})
        gpus = 0
        with contextlib.suppress(ValueError):
            gpus = int(resources.get(GPU, 0))
        if not gpus:
            continue
        texts = (labels.get(name, "") for name in GPU_LABELS)
        named = next(filter(None, map(answers.gpu_types.type_of, texts)), "")
        keys = {taint["key"] for taint in item.get("spec", {}).get("taints", [])}
        taints = sorted(key for key in keys if not key.startswith(OF_KUBERNETES))
        rdma = sorted(name for name in resources if name.startswith("rdma/"))
        kind = NodeKind(named, gpus, labels.get(MACHINE, ""), tuple(rdma), tuple(taints))
        found[kind] += 1
    if not found:
        raise UserError(
            f"no node of this cluster offers {GPU}: its administrator installs NVIDIA's device "
            "plugin or GPU operator"
        )
    return found


def _resolve_gpus(answers: Answers, kinds: Mapping[NodeKind, int]) -> list[NodeKind]:
    """Sets GPU_TYPE and GPUS_PER_NODE; returns the kinds of nodes that have these."""
    texts = collections.defaultdict(list)
    for kind, n in kinds.items():
        if kind.gpu_type:
            texts[kind.gpu_type].append(f"{n} node{'s' * (n > 1)} of {kind}")
    choices = {name: " and ".join(each) for name, each in texts.items()}
    gpu_type = answers.resolve("GPU_TYPE", choices or dict.fromkeys(answers.gpu_types, ""))
    usable = [kind for kind in kinds if kind.gpu_type in ("", gpu_type)]
    count = answers.resolve("GPUS_PER_NODE", dict.fromkeys((str(k.gpus) for k in usable), ""))
    return [kind for kind in usable if count in ("", str(kind.gpus))]


def _queues(client: kubectl.Client) -> dict[str, str]:
    """Kueue's queues in the namespace; {} without Kueue."""
    items, why = client.get("localqueues.kueue.x-k8s.io")
    of = lambda item: item.get("spec", {}).get("clusterQueue", "")
    return {} if why else {item["metadata"]["name"]: of(item) for item in items}


def _resolve_claim(answers: Answers, client: kubectl.Client) -> None:
    """Sets RUN_CONF_MOUNTS and PVC_DIR to a claim that is chosen on the terminal, if one is."""
    items, why = client.get("persistentvolumeclaims")
    choices = {}
    for item in () if why else items:
        spec, name = item.get("spec", {}), item["metadata"]["name"]
        size = spec.get("resources", {}).get("requests", {}).get("storage", "")
        about = ", ".join(filter(None, [size, *spec.get("accessModes", [])]))
        choices[f"results:{CLAIM_PATH}:{name}"] = about
    if choices and answers.resolve("RUN_CONF_MOUNTS", choices, optional=True):
        if answers.found["RUN_CONF_MOUNTS"] in choices:
            answers.resolve("PVC_DIR", {CLAIM_PATH: ""})
        else:
            answers.resolve("PVC_DIR", {})
