"""Kubernetes: the JobSet of a job, and its submission through kubectl.

A JobSet (jobset.x-k8s.io/v1alpha2) has one pod per node, which runs maxbench.launch.node. Process
0 is in the pod with completion index 0, whose host name the JobSet's service makes known to the
others before it is ready. Exit code 75, a preempted pod and a lost node restart the whole JobSet;
any other failure ends it. Each restart has a folder of its own, and resumes from the newest
checkpoint.
"""

import dataclasses
import functools
import json
import os
import pathlib
import re
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import yaml

from maxbench.config import exit_codes, ports
from maxbench.config.errors import UserError
from maxbench.launch import images, jobs, kubectl, submission
from maxbench.launch.node import NodeJob
from maxbench.launch.submission import Submission
from maxbench.launch.variables import JobConfig
from maxbench.run_logs import folders

API_VERSION = "jobset.x-k8s.io/v1alpha2"
REPLICATED_JOB, CONTAINER = "node", "maxbench"
LABEL = "app.kubernetes.io/managed-by"  # of JobSets and pods; its value is CONTAINER
NAME_LENGTH = 45  # a pod's name adds -node-0-<index>-<5 letters>, and has 63 letters at most
NODE_LABEL = "kubernetes.io/hostname"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
ATTEMPT = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
GRACE_S = 300  # from SIGTERM to SIGKILL of a pod: a checkpoint is written
STAMP_STEP = 100  # stamps of first starts are multiples: a restart adds its number
POLL_S = 5  # between two queries of --wait
EMPTY_DIR = "/maxbench"  # folder of results of a pod without a claim for them
FORWARDED = ("XLA_", "NCCL_", "NVTE_")  # variables of this environment that the pods get
Manifest = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
    """A provider's network: a table of kubernetes_networks.toml."""

    machine: str  # type of the nodes
    gpu_type: str
    gpus: int  # of a node, of which a pod uses all
    default_interface: str
    interfaces: tuple[str, ...]  # networks of eth0, eth1, ...
    node_selector: dict[str, str]
    host_paths: dict[str, str]  # folder of the node: folder of the container
    environment: dict[str, str]
    source: str  # script that sets NCCL's variables

    def annotations(self) -> dict[str, str]:
        """Annotations of a pod that gets these interfaces."""
        names = [f"eth{i}" for i in range(len(self.interfaces))]
        rows = [
            json.dumps({"interfaceName": name, "network": network})
            for name, network in zip(names, self.interfaces, strict=True)
        ]
        return {
            "networking.gke.io/default-interface": self.default_interface,
            "networking.gke.io/interfaces": "[\n  " + ",\n  ".join(rows) + "\n]\n",
        }


@functools.cache
def networks() -> dict[str, Network]:
    """The networks of kubernetes_networks.toml by name."""
    table = tomllib.loads(pathlib.Path(__file__).with_name("kubernetes_networks.toml").read_text())
    return {
        name: Network(**{**fields, "interfaces": tuple(fields["interfaces"])})
        for name, fields in table.items()
    }


def manifest(s: JobConfig, kind: str, stamp: int) -> Manifest:
    """The JobSet of a job.

    Args:
      stamp: timestamp in the name of the run's folder.

    Raises:
      UserError: a variable is missing, or cannot be used on Kubernetes.
    """
    v, name = s.values, job_set_name(s, kind, stamp)
    labels = {LABEL: CONTAINER, "app.kubernetes.io/name": name}
    queue = {"kueue.x-k8s.io/queue-name": v["K8S_QUEUE"]} if v["K8S_QUEUE"] else {}
    if queue and v["K8S_PRIORITY"]:
        queue["kueue.x-k8s.io/priority-class"] = v["K8S_PRIORITY"]
    metadata = {"name": name, "labels": labels | queue}
    metadata["annotations"] = {"maxbench/run": f"{jobs.job_name(s, kind)}_{stamp}"}
    if v["K8S_NAMESPACE"]:
        metadata["namespace"] = v["K8S_NAMESPACE"]
    job = {
        "parallelism": s.nodes,
        "completions": s.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": pod_failure_policy("--checkpoint" in s.flags and not kind),
        "template": {
            "metadata": {"labels": labels} | _annotations(s),
            "spec": _pod(s, kind, stamp),
        },
    }
    return {
        "apiVersion": API_VERSION,
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": _restarts(s),
                "rules": [
                    {
                        "name": "wouldFailAgain",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": [
                {"name": REPLICATED_JOB, "replicas": 1, "template": {"spec": job}},
            ],
        },
    }


def pod_failure_policy(saves: bool) -> Manifest:
    """Which failures of a pod end the job for good; all others fail it, and restart the JobSet.

    A disruption (preemption, eviction, a lost node) counts as a failure whatever the exit code. Of
    a job that saves checkpoints, a pod that was killed for want of memory restarts it too.
    """
    ends = (exit_codes.RESTART, exit_codes.KILLED, exit_codes.TERMINATED)
    restarting = [code for code in ends if exit_codes.restarts(code, "", saves)]
    disrupted = {"type": "DisruptionTarget", "status": "True"}
    codes = {"containerName": CONTAINER, "operator": "NotIn", "values": restarting}
    return {
        "rules": [
            {"action": "Count", "onPodConditions": [disrupted]},
            {"action": "FailJob", "onExitCodes": codes},
        ]
    }


def job_set_name(s: JobConfig, kind: str, stamp: int) -> str:
    """Name of a JobSet: the run's in short, and its stamp in letters and digits."""
    digits, number = "", stamp
    while number:
        number, digit = divmod(number, 36)
        digits = "0123456789abcdefghijklmnopqrstuvwxyz"[digit] + digits
    suffix = f"-{digits or '0'}"
    return jobs.short_name(s, kind, NAME_LENGTH - len(suffix)) + suffix


def pod_folder(s: JobConfig) -> str:
    """The folder of results in the pods."""
    return s.values["PVC_DIR"] or EMPTY_DIR


def _restarts(s: JobConfig) -> int:
    """MAX_RESTARTS, below the distance of two stamps."""
    if (restarts := s.number("MAX_RESTARTS")) >= STAMP_STEP:
        raise UserError(f"MAX_RESTARTS={restarts} must be below {STAMP_STEP}")
    return restarts


def _network(s: JobConfig) -> Network | None:
    """The provider's network.

    Raises:
      UserError: the run is for other GPUs, or uses a part of a node.
    """
    if not (name := s.values["K8S_NETWORK"]):
        return None
    network, gpu_type = networks()[name], s.values["GPU_TYPE"]
    if gpu_type != network.gpu_type and not s.values["HARDWARE"]:
        raise UserError(
            f"K8S_NETWORK={name!r} is of machines with {network.gpu_type}, and GPU_TYPE is "
            f"{gpu_type!r}: set GPU_TYPE={network.gpu_type}"
        )
    if (used := jobs.gpus_of_node(s)) != network.gpus:
        raise UserError(
            f"K8S_NETWORK={name!r} gives a pod all NICs of a node, and JOB_TOTAL_GPUS="
            f"{s.run.layout.gpus} uses {used} of its {network.gpus} GPUs; leave K8S_NETWORK empty"
        )
    return network


def _annotations(s: JobConfig) -> Manifest:
    """Annotations of the pods: the provider's network, Kueue's topology, and the user's."""
    network = _network(s)
    found = dict(network.annotations()) if network else {}
    if text := s.values["K8S_TOPOLOGY"]:
        how, _, level = text.partition("=")
        if how not in ("required", "preferred") or not level:
            raise UserError(
                f"K8S_TOPOLOGY={text!r} must be required=LABEL or preferred=LABEL, as "
                "required=cloud.google.com/gce-topology-block"
            )
        found[f"kueue.x-k8s.io/podset-{how}-topology"] = level
    found |= _pairs("K8S_ANNOTATIONS", s.values["K8S_ANNOTATIONS"])
    return {"annotations": found} if found else {}


def _pairs(name: str, text: str, default: str | None = None) -> dict[str, str]:
    """'key=value;key=value' as a dict; `default` is the value of a key without one.

    Raises:
      UserError: a part is not of this form.
    """
    found = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        key, is_set, value = part.partition("=")
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9./_-]*[A-Za-z0-9])?", key) or not (
            is_set or default is not None
        ):
            raise UserError(f"{name}: {part!r} is not key=value; several are separated by ;")
        found[key] = value if is_set else str(default)
    return found


def _tolerations(text: str) -> list[Manifest]:
    """Tolerations from 'key;key=value;key:effect'."""
    found = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        match = re.fullmatch(
            r"([A-Za-z0-9][A-Za-z0-9./_-]*)(?:=([A-Za-z0-9._-]*))?(?::(NoSchedule|NoExecute|PreferNoSchedule))?",
            part,
        )
        if not match:
            raise UserError(
                f"K8S_TOLERATIONS: {part!r} is not key, key=value or key:effect; effects are "
                "NoSchedule, NoExecute, PreferNoSchedule"
            )
        key, value, effect = match.groups()
        toleration = {"key": key, "operator": "Exists" if value is None else "Equal"}
        toleration |= {"value": value} if value is not None else {}
        found.append(toleration | ({"effect": effect} if effect else {}))
    return found


def _pod(s: JobConfig, kind: str, stamp: int) -> Manifest:
    """The specification of a pod."""
    v, network = s.values, _network(s)
    spec: Manifest = {
        "restartPolicy": "Never",  # a restart is of all pods
        "terminationGracePeriodSeconds": GRACE_S,
        "enableServiceLinks": False,
    }
    if v["K8S_HOST_NETWORK"] == "true":
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if v["K8S_SERVICE_ACCOUNT"]:
        spec["serviceAccountName"] = v["K8S_SERVICE_ACCOUNT"]
    if v["K8S_PRIORITY"] and not v["K8S_QUEUE"]:
        spec["priorityClassName"] = v["K8S_PRIORITY"]
    selector = dict(network.node_selector) if network else {}
    selector |= _pairs("K8S_NODE_SELECTOR", v["K8S_NODE_SELECTOR"])
    spec |= {"nodeSelector": selector} if selector else {}
    if excluded := [name for name in v["EXCLUDE_NODES"].split(",") if name]:
        spec["affinity"] = _not_on(excluded)
    spec |= {"tolerations": t} if (t := _tolerations(v["K8S_TOLERATIONS"])) else {}
    if v["K8S_CLAIM"]:
        spec["resourceClaims"] = [{"name": "claim", "resourceClaimTemplateName": v["K8S_CLAIM"]}]
    volumes, mounts = _volumes(s, network)
    spec["containers"] = [_container(s, kind, stamp, network) | {"volumeMounts": mounts}]
    return spec | {"volumes": volumes}


def _not_on(nodes: Sequence[str]) -> Manifest:
    """The affinity of a pod that must not run on these nodes."""
    term = {"key": NODE_LABEL, "operator": "NotIn", "values": list(nodes)}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [term]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


def _volumes(s: JobConfig, network: Network | None) -> tuple[list[Manifest], list[Manifest]]:
    """Volumes of a pod and their mounts: shared memory, claims, folders of the node.

    Raises:
      UserError: a mount is malformed; PVC_DIR is in none of them; or the run saves checkpoints, and
        no volume keeps them.
    """
    sources: list[tuple[Manifest, str]] = [({"emptyDir": {"medium": "Memory"}}, "/dev/shm")]
    for part in filter(None, (part.strip() for part in s.values["RUN_CONF_MOUNTS"].split(","))):
        words = part.split(":")
        if len(words) == 3 and all(words) and words[1].startswith("/"):
            sources.append(({"persistentVolumeClaim": {"claimName": words[2]}}, words[1]))
        elif len(words) == 2 and all(word.startswith("/") for word in words):
            sources.append(({"hostPath": {"path": words[0]}}, words[1]))
        else:
            raise UserError(
                f"RUN_CONF_MOUNTS: {part!r} is neither name:path:claim, as "
                "results:/results:my-claim, nor /folder-of-the-node:/path"
            )
    kept = [path for _, path in sources[1:]]
    if results := s.values["PVC_DIR"]:
        if not any(pathlib.PurePath(results).is_relative_to(path) for path in kept):
            listed = ", ".join(kept) or "none"
            raise UserError(f"PVC_DIR={results!r} is in none of the mounted paths: {listed}")
    else:
        sources.append(({"emptyDir": {}}, EMPTY_DIR))
        if "--checkpoint" in s.flags:
            raise UserError(
                "a run with checkpoints needs a volume that keeps them: set RUN_CONF_MOUNTS="
                "results:/results:CLAIM and PVC_DIR=/results, or CHECKPOINT_EVERY=0"
            )
    for of_node, path in (network.host_paths if network else {}).items():
        sources.append(({"hostPath": {"path": of_node}}, path))
    volumes, mounts = [], []
    for number, (source, path) in enumerate(sources):
        name = "shared-memory" if path == "/dev/shm" else f"volume-{number}"
        volumes.append({"name": name, **source})
        mounts.append({"name": name, "mountPath": path})
    return volumes, mounts


def _container(s: JobConfig, kind: str, stamp: int, network: Network | None) -> Manifest:
    """The container of a pod, without its mounts.

    Raises:
      UserError: there is no image; a file is of this machine alone.
    """
    v = s.values
    if not v["RUN_CONF_IMAGE"]:
        raise UserError(
            "RUN_CONF_IMAGE is not set, and Kubernetes needs it: the name of an image in a registry"
            ", with jax for GPUs and maxbench (or K8S_CODE)"
        )
    images.check_for_registry(v["RUN_CONF_IMAGE"], "Kubernetes")
    if kind == "nsys" and not v["K8S_CODE"]:
        raise UserError(
            "PROFILER='nsys' needs launch/task.sh of a checkout: set K8S_CODE, or PROFILER=xplane"
        )
    pairs = _environment(s, kind, stamp, network)
    environment: list[Manifest] = [{"name": name, "value": text} for name, text in pairs]
    job = _node_job(s, kind, stamp, network)
    environment += [{"name": name, "value": text} for name, text in job.env().items()]
    for name, field in {
        "MB_NODE_INDEX": INDEX,
        "MB_ATTEMPT": ATTEMPT,
        "MB_NODE_NAME": "spec.nodeName",
    }.items():
        environment.append({"name": name, "valueFrom": {"fieldRef": {"fieldPath": field}}})
    resources = {"nvidia.com/gpu": str(job.gpus)} if job.gpus else {}
    resources |= _pairs("K8S_RESOURCES", v["K8S_RESOURCES"], default="1")
    limits: Manifest = {"limits": resources} if resources else {}
    if v["K8S_CLAIM"]:
        limits["claims"] = [{"name": "claim"}]
    container: Manifest = {"name": CONTAINER, "image": v["RUN_CONF_IMAGE"]}
    if v["K8S_CODE"]:
        container["workingDir"] = v["K8S_CODE"]
    container["command"] = ["python3", "-m", "maxbench.launch.node", "--"]
    container["args"] = _train(s, kind)
    container["env"] = environment
    container |= {"resources": limits} if limits else {}
    if network or any(name.startswith("rdma/") for name in resources):
        # A NIC reads registered memory directly: it must not be swapped out.
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    return container


def _train(s: JobConfig, kind: str) -> list[str]:
    """The command of a process, with the folder and the workload file as the pods see them.

    Raises:
      UserError: the workload or HARDWARE file is not in the container.
    """
    here, there = str(s.out), pod_folder(s)
    mounted = [m.split(":")[1] for m in s.values["RUN_CONF_MOUNTS"].split(",") if ":" in m]
    words = [there if word == here else word for word in jobs.command(s, kind)]
    config = s.flags[1].partition(":")[0]  # a name, or the path of a file elsewhere
    for name, file in {"MODEL": config, "HARDWARE": s.values["HARDWARE"]}.items():
        if pathlib.Path(file).is_absolute() and not any(
            pathlib.PurePath(file).is_relative_to(path) for path in mounted
        ):
            raise UserError(
                f"{name}={file!r} is a file of this machine, which the pods do not see: put it "
                "into a mounted path, or into configs/ of K8S_CODE"
            )
    return words


def _environment(
    s: JobConfig, kind: str, stamp: int, network: Network | None
) -> list[tuple[str, str]]:
    """Variables of the processes: of the GPU type, of the network, and the user's own."""
    env = {"PYTHONUNBUFFERED": "1"}
    env |= {"PYTHONPATH": s.values["K8S_CODE"]} if s.values["K8S_CODE"] else {}
    env |= network.environment if network else {}
    env |= {k: v for k, v in os.environ.items() if k.startswith(FORWARDED)}
    env |= jobs.environment(s, kind)
    here, there = str(s.out), pod_folder(s)
    # Two JobSets of one name may run at once: none reads a program that another one is writing.
    env["JAX_COMPILATION_CACHE_DIR"] = f"{there}/cache/{job_set_name(s, kind, stamp)}"
    if not s.on("DISABLE_PINNING"):
        env["MB_BIND"] = "numa"
    if kind == "nsys":
        env |= jobs.nsys_variables(s)
    return [(name, text.replace(here, there)) for name, text in env.items()]


def _node_job(s: JobConfig, kind: str, stamp: int, network: Network | None) -> NodeJob:
    """The job as maxbench.launch.node in a pod gets it, without what differs between pods."""
    name, many = job_set_name(s, kind, stamp), s.nodes * s.tasks_per_node > 1
    host = f"{name}-{REPLICATED_JOB}-0-0.{name}"  # by the JobSet's headless service
    return jobs.node_job(
        s,
        kind,
        stamp,
        job=name,
        scheduler="kubernetes",
        namespace=s.values["K8S_NAMESPACE"],
        context=s.values["K8S_CONTEXT"],
        out=pod_folder(s),
        coordinator=ports.address(host, jobs.port(name)) if many else "",
        start_timeout_s=jobs.seconds(s.values["START_TIMEOUT"]) if s.nodes > 1 else 0,
        source=network.source if network else "",
        ship="" if pod_folder(s) == str(s.out) else "true",
    )


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def text(job_set: Manifest) -> str:
    """A manifest as YAML."""
    return yaml.dump(job_set, Dumper=_Dumper, sort_keys=False, width=100)


def dry_run(runs: Sequence[JobConfig]) -> str:
    """The manifests that submit() would create."""
    each = [(jobs.job_name(s, kind), s, kind) for s in runs for kind in jobs.job_kinds(s)]
    times = Counter((job, f": {s.expect}" if s.expect else "") for job, s, _ in each)
    listed = [f"# {n} x {job}{expected}" for (job, expected), n in times.items()]
    parts = ["\n".join(listed)] if len(runs) > 1 else []
    stamp = int(time.time()) // STAMP_STEP * STAMP_STEP
    for job, s, kind in {x[0]: x for x in each}.values():
        parts.append(f"# {job}: {s.describe()}\n{text(manifest(s, kind, stamp))}")
    return "---\n".join(parts).rstrip("\n")


def submit(runs: Sequence[JobConfig], wait: bool, suite: str = "") -> int:
    """Creates the JobSets; with `wait`, returns 1 if one does not complete.

    Raises:
      UserError: kubectl is missing, or the cluster refuses a JobSet.
    """
    each = [(s, kind) for s in runs for kind in jobs.job_kinds(s)]
    for s, kind in each:  # all are checked before the first is created
        manifest(s, kind, 0)
    client = kubectl.Client(runs[0].values["K8S_CONTEXT"], runs[0].values["K8S_NAMESPACE"])
    client.check_job_sets()
    # In the manifest and in the folders the namespace is explicit: the context may change.
    of_here = {"K8S_NAMESPACE": client.namespace}
    each = [(dataclasses.replace(s, values=s.values | of_here), kind) for s, kind in each]
    results, suite_list = runs[0].out / "experiments", None
    if suite:
        results.mkdir(parents=True, exist_ok=True)
        suite_list = jobs.suite_writer(each, results, suite)
    created = []
    for s, kind in each:
        folder, stamp = folders.new_folder(s.out, jobs.job_name(s, kind), STAMP_STEP)
        job_set = manifest(s, kind, stamp)
        (folder / "jobset.yaml").write_text(text(job_set))
        print(f"submitting {jobs.job_name(s, kind)}: {s.describe()}", flush=True)
        name = client.create(folder / "jobset.yaml")
        shared = pod_folder(s) == str(s.out)
        job = Submission(name, "kubernetes", client.namespace, client.context, shared)
        submission.write(folder, job)
        if suite_list and not kind:
            suite_list.add(folder)
        print(f"job {name}: {folder}", flush=True)
        created.append((folder, job))
    submission.print_next_steps(results, str(suite_list.file) if suite_list else "")
    return _wait_for(created) if wait else 0


def _wait_for(created: Sequence[tuple[pathlib.Path, Submission]]) -> int:
    """Waits until all jobs have ended; returns 0 if all completed, else 1."""
    known: dict[Submission, tuple[str, str]] = {}
    while True:
        states = kubectl.states({job for _, job in created})
        for _, job in created:
            if (state := states.get(job)) and state != known.get(job):
                known[job] = state
                print("  ".join(filter(None, [job.job, *state])), file=sys.stderr, flush=True)
        if len(known) == len(created) and all(s[0] in submission.ENDED for s in known.values()):
            break
        time.sleep(POLL_S)
    kubectl.refresh(dict(created))
    return 0 if all(state == "COMPLETED" for state, _ in known.values()) else 1
