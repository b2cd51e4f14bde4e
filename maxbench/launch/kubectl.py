"""Jobs on Kubernetes as kubectl shows them: state, reason, logs; and their end."""

import contextlib
import json
import pathlib
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from maxbench.config import exit_codes
from maxbench.config.errors import UserError, escape_control
from maxbench.launch import node, submission
from maxbench.launch.submission import Submission

JOB_SETS = "jobsets.jobset.x-k8s.io"
MANAGED = "app.kubernetes.io/managed-by=maxbench"
JOB_SET_NAME = "jobset.sigs.k8s.io/jobset-name"
ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"
INDEX = "batch.kubernetes.io/job-completion-index"
PREFIX = re.compile(r"^.*error when creating \"[^\"]*\": ")  # of kubectl, before the API's reason
TIMEOUT_S = 60
TAIL = 400  # lines of the log of a pod that runs
Item = Mapping[str, Any]  # an object of the API


class Client:
    """kubectl with a context and a namespace.

    Args:
      context: '' = the current one.
      namespace: '' = that of the context.
    """

    def __init__(self, context: str, namespace: str):
        self.context, self.namespace = context, namespace

    def run(self, *words: str) -> tuple[str, str]:
        """Output of kubectl, and in one line why it failed, or ''."""
        command = ["kubectl", *(["--context", self.context] if self.context else [])]
        command += ["--namespace", self.namespace] if self.namespace else []
        try:
            done = subprocess.run(
                [*command, *words], capture_output=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.TimeoutExpired) as e:
            return "", escape_control(str(e))
        out = done.stdout.decode(errors="replace")
        lines = done.stderr.decode(errors="replace").split("\n")
        why = escape_control(" ".join(" ".join(lines).split())) if done.returncode else ""
        return out, why or ("kubectl failed" if done.returncode else "")

    def get(self, *words: str) -> tuple[list[Item], str]:
        """Items of `kubectl get`, and why it failed, or ''."""
        text, why = self.run("get", *words, "-o", "json")
        with contextlib.suppress(ValueError):
            content = json.loads(text)
            return content.get("items", [content]), why
        return [], why or "kubectl printed no JSON"

    def check_job_sets(self) -> None:
        """Sets the namespace if it is not known.

        Raises:
          UserError: kubectl is missing, the cluster does not answer, or has no JobSets.
        """
        if not shutil.which("kubectl"):
            raise UserError(
                "kubectl is not on PATH: install it (it needs no other program), or submit from a "
                "machine that has it; --dry_run prints the manifest without it"
            )
        names, why = self.run("api-resources", "--api-group=jobset.x-k8s.io", "-o", "name")
        if why:
            raise UserError(f"kubectl cannot reach the cluster: {why}")
        if JOB_SETS not in names.split():
            raise UserError(
                "this cluster has no JobSets (jobset.x-k8s.io): its administrator installs them "
                "with the manifest of a release of kubernetes-sigs/jobset"
            )
        if not self.namespace:
            view = ("config", "view", "--minify", "-o", "jsonpath={..namespace}")
            self.namespace = self.run(*view)[0].strip() or "default"

    def create(self, file: pathlib.Path) -> str:
        """Creates the object of a manifest; returns its name.

        Raises:
          UserError: the cluster refuses it.
        """
        name, why = self.run("create", "-f", str(file), "-o", "jsonpath={.metadata.name}")
        if why:
            reason = PREFIX.sub("", why)
            raise UserError(f"the cluster refused {file}: {reason}")
        return name.strip()


class Pod(NamedTuple):
    """A pod of a job."""

    name: str
    node: int  # its number
    attempt: int  # restart of the JobSet
    phase: str  # Pending, Running, Succeeded, Failed
    why: str  # it is pending or has failed

    @classmethod
    def of(cls, item: Item) -> "Pod":
        """The pod of an object of the API."""
        metadata, status = item.get("metadata", {}), item.get("status", {})
        labels = metadata.get("labels", {})
        index = metadata.get("annotations", {}).get(INDEX) or labels.get(INDEX, "0")
        phase = status.get("phase", "Pending")
        whys = [*_container_reasons(status), *_not_scheduled(status), status.get("message", "")]
        why = "" if phase in ("Running", "Succeeded") else next(filter(None, whys), "")
        attempt = labels.get(ATTEMPT, "0")
        return cls(metadata["name"], int(index), int(attempt), phase, " ".join(why.split()))


def _container_reasons(status: Item) -> Iterable[str]:
    """Why containers wait or have ended."""
    for container in status.get("containerStatuses", []):
        state = container.get("state", {})
        if waiting := state.get("waiting"):
            texts = [waiting.get("reason", ""), waiting.get("message", "")]
            if texts[0] not in ("ContainerCreating", "PodInitializing"):
                yield ": ".join(filter(None, texts))
            else:
                yield "its image is being pulled or its volumes are being attached"
        if ended := state.get("terminated"):
            reason = ended.get("reason", "Error")
            text = f"exit code {ended.get('exitCode')}"
            yield text if reason in ("Error", "Completed") else f"{reason}, {text}"


def _not_scheduled(status: Item) -> Iterable[str]:
    """Why a pod has no node."""
    for condition in status.get("conditions", []):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            yield condition.get("message", condition.get("reason", ""))


def states(jobs: Iterable[Submission]) -> dict[Submission, tuple[str, str]]:
    """(state, reason) of jobs. If the cluster does not answer, the state is '' and the reason says
    so."""
    found: dict[Submission, tuple[str, str]] = {}
    for client, members in _by_cluster(jobs):
        items, why = client.get(f"{JOB_SETS},pods", "-l", MANAGED)
        if why:
            found |= {job: ("", f"kubectl: {why}") for job in members}
            continue
        sets = {x["metadata"]["name"]: x for x in items if x.get("kind") == "JobSet"}
        pods = _pods(items)
        for job in members:
            if job.job in sets:
                found[job] = _state(sets[job.job], pods[job.job], client)
            else:
                found[job] = ("CANCELLED", "its JobSet is deleted")
    return found


def _by_cluster(jobs: Iterable[Submission]) -> list[tuple[Client, list[Submission]]]:
    """Jobs by context and namespace."""
    groups = defaultdict(list)
    for job in jobs:
        groups[job.context, job.namespace].append(job)
    return [(Client(*key), members) for key, members in groups.items()]


def _pods(items: Iterable[Item]) -> dict[str, list[Pod]]:
    """Pods of the newest attempt of each JobSet, by node."""
    all_pods = defaultdict(list)
    for item in items:
        name = item.get("metadata", {}).get("labels", {}).get(JOB_SET_NAME)
        if item.get("kind") == "Pod" and name:
            all_pods[name].append(Pod.of(item))
    newest = defaultdict(list)
    for name, pods in all_pods.items():
        last = max(pod.attempt for pod in pods)
        newest[name] = sorted(pod for pod in pods if pod.attempt == last)
    return newest


def _state(job_set: Item, pods: list[Pod], client: Client) -> tuple[str, str]:
    """State of a JobSet in Slurm's words, and its reason."""
    status, spec = job_set.get("status", {}), job_set.get("spec", {})
    true = {c["type"]: c for c in status.get("conditions", []) if c.get("status") == "True"}
    failed = [f"node {pod.node}: {pod.why}" for pod in pods if pod.phase == "Failed"]
    if "Completed" in true:
        return "COMPLETED", ""
    if "Failed" in true:
        return "FAILED", "; ".join(failed[:3]) or true["Failed"].get("message", "")
    restarts = status.get("restarts", 0)
    prefix = f"restart {restarts}" if restarts else ""
    if spec.get("suspend"):
        return "PENDING", _join(prefix, _queued(job_set, client))
    pending = [pod for pod in pods if pod.phase not in ("Running", "Succeeded", "Failed")]
    wanted = sum(
        int(j.get("replicas", 1)) * int(j["template"]["spec"].get("parallelism", 1))
        for j in spec.get("replicatedJobs", [])
    )
    if len(pods) < wanted and not failed:
        return "PENDING", _join(prefix, f"{wanted - len(pods)} of {wanted} pods not yet created")
    if pending:
        why = next((pod.why for pod in pending if pod.why), "")
        return "PENDING", _join(prefix, f"{len(pending)} of {wanted} pods pending", why)
    return "RUNNING", _join(prefix, *failed[:1])


def _join(*texts: str) -> str:
    return ": ".join(filter(None, texts))


def _queued(job_set: Item, client: Client) -> str:
    """Why Kueue has not admitted a JobSet."""
    uid = job_set["metadata"].get("uid", "")
    queue = job_set["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name", "")
    workloads, _ = client.get("workloads.kueue.x-k8s.io", "-l", f"kueue.x-k8s.io/job-uid={uid}")
    for workload in workloads if queue else []:
        for condition in workload.get("status", {}).get("conditions", []):
            if condition.get("type") == "QuotaReserved" and condition.get("status") == "False":
                return f"queue {queue}: {' '.join(condition.get('message', '').split())}"
    return f"waits in queue {queue}" if queue else "suspended"


def refresh(run_folders: Mapping[pathlib.Path, Submission]) -> None:
    """Brings logs and results of jobs into their folders here, unless both see one file system.

    A start after the first one has a folder of its own. Jobs whose files are complete are left
    alone, and a cluster that does not answer.
    """
    first: dict[Submission, pathlib.Path] = {}
    complete = set()
    for folder, job in sorted(run_folders.items(), key=lambda item: _stamp(item[0])):
        first.setdefault(job, folder)
        ended = submission.read_json(folder / "exit.json")
        if ended and ended.get("code") != exit_codes.RESTART:
            complete.add(job)
    waiting = [job for job in first if job.scheduler == "kubernetes" and not job.shared]
    for client, members in _by_cluster(job for job in waiting if job not in complete):
        items, why = client.get("pods", "-l", MANAGED)
        if why:
            print(f"note: no logs of Kubernetes: {why}", file=sys.stderr)
            continue
        pods = _pods(items)
        for job in members:
            for pod in pods[job.job]:
                if pod.phase != "Pending" and (pod.node == 0 or pod.phase == "Failed"):
                    _fetch(client, job, pod, first[job])


def _stamp(folder: pathlib.Path) -> int:
    stamp = folder.name.rpartition("_")[2]
    return int(stamp) if stamp.isdecimal() else 0


def _fetch(client: Client, job: Submission, pod: Pod, first: pathlib.Path) -> None:
    """Writes the log of a pod, and the run's files in it, to the folder of its start."""
    tail = [f"--tail={TAIL}"] if pod.phase == "Running" else []
    text, why = client.run("logs", pod.name, *tail)
    if why:
        return
    name = first.name.rpartition("_")[0]
    folder = first.with_name(f"{name}_{_stamp(first) + pod.attempt}")
    folder.mkdir(exist_ok=True)
    if not (folder / submission.FILE).exists():
        submission.write(folder, job)
    lines: list[str] = []
    archive = node.received(text.splitlines(keepends=True), lines.append)
    (folder / f"node-{pod.node}.log").write_text("".join(lines))
    node.unpack(archive, folder.parent)


def cancel(job: Submission) -> str:
    """Deletes a JobSet and its pods; returns why that failed, or ''."""
    client = Client(job.context, job.namespace)
    return client.run("delete", JOB_SETS, job.job, "--wait=false")[1]
