"""A Kubernetes API on this machine for kubectl, with JobSets whose pods are processes here.

It serves the resources that maxbench asks for, and does what the controllers of Jobs and JobSets
and the kubelet do with one replicated job of indexed pods: pods, their logs, failure policies,
restarts. Mount paths are folders of this machine; the host of the coordinator is 127.0.0.1.
"""

import contextlib
import http.server
import json
import os
import pathlib
import re
import signal
import subprocess
import threading
import time
import urllib.parse
import uuid
from collections.abc import Iterator

JOBSET, KUEUE = "jobset.x-k8s.io/v1alpha2", "kueue.x-k8s.io/v1beta1"
KINDS = {  # plural -> (group and version, kind)
    "pods": ("v1", "Pod"),
    "nodes": ("v1", "Node"),
    "persistentvolumeclaims": ("v1", "PersistentVolumeClaim"),
    "jobsets": (JOBSET, "JobSet"),
    "workloads": (KUEUE, "Workload"),
    "localqueues": (KUEUE, "LocalQueue"),
}
INDEX = "batch.kubernetes.io/job-completion-index"
KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: here
contexts: [{{name: here, context: {{cluster: here, user: me, namespace: team}}}}]
clusters: [{{name: here, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: me, user: {{}}}}]
"""


class Cluster:
    """The objects of the API by plural, namespace and name; and the processes of the pods.

    Attributes:
      pending: node numbers whose pods are not scheduled, as for want of GPUs.
      refused: message with which a JobSet is refused, or ''.
      grace_s: from SIGTERM to SIGKILL of a pod.
    """

    def __init__(self, root: pathlib.Path, groups: tuple[str, ...] = ("v1", JOBSET, KUEUE)):
        self.root, self.groups = root, groups
        self.objects: dict[tuple[str, str], dict] = {}  # (plural, name)
        self.processes: dict[str, subprocess.Popen] = {}
        self.pending: set[int] = set()
        self.refused, self.grace_s = "", 20
        self.lock, self.ended = threading.RLock(), threading.Event()
        (root / "logs").mkdir(parents=True)
        handler = type("Handler", (_Handler,), {"cluster": self})
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        port = self.server.server_address[1]
        (root / "kubeconfig").write_text(KUBECONFIG.format(port=port))
        self.env = {"KUBECONFIG": str(root / "kubeconfig"), "KUBECACHEDIR": str(root / "cache")}
        for loop in (self.server.serve_forever, self._control):
            threading.Thread(target=loop, daemon=True).start()

    def add(self, plural: str, name: str, **fields) -> dict:
        """Creates an object."""
        version, kind = KINDS[plural]
        metadata = {"name": name, "namespace": "team", "uid": str(uuid.uuid4())}
        metadata |= fields.pop("metadata", {})
        item = {"apiVersion": version, "kind": kind, "metadata": metadata, **fields}
        with self.lock:
            self.objects[plural, name] = item
        return item

    def listed(self, plural: str, selector: str = "") -> list[dict]:
        """Objects with labels."""
        wanted = dict(part.split("=", 1) for part in selector.split(",") if part)
        with self.lock:
            items = [x for (p, _), x in self.objects.items() if p == plural]
        labels = lambda x: x["metadata"].get("labels", {})
        return [x for x in items if wanted.items() <= labels(x).items()]

    def preempt(self, index: int) -> None:
        """Evicts the pod of a node, as for a job of higher priority or a node that goes away."""
        with self.lock:
            pod = next(p for p in self.listed("pods") if _index(p) == index)
            condition = {"type": "DisruptionTarget", "status": "True"}
            pod["status"].setdefault("conditions", []).append(condition)
        self._end(pod["metadata"]["name"])

    def stop(self) -> None:
        self.ended.set()
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.server.shutdown()
        self.server.server_close()

    def _control(self) -> None:
        while not self.ended.wait(0.1):
            with self.lock:
                names = [name for plural, name in self.objects if plural == "jobsets"]
            for name in names:
                with self.lock:
                    job_set = self.objects.get(("jobsets", name))
                if job_set:
                    self._reconcile(job_set)

    def _reconcile(self, job_set: dict) -> None:
        """One pass of the controllers over a JobSet."""
        status, spec = job_set.setdefault("status", {"restarts": 0}), job_set["spec"]
        if status.get("conditions") or spec.get("suspend"):
            return
        name = job_set["metadata"]["name"]
        job = spec["replicatedJobs"][0]["template"]["spec"]
        pods = self.listed("pods", f"jobset.sigs.k8s.io/jobset-name={name}")
        if not pods:
            for index in range(job["completions"]):
                self._create_pod(job_set, job, index)
            return
        for pod in pods:
            self._run(pod)
        failed = [p for p in pods if p["status"]["phase"] == "Failed"]
        if not failed:
            if all(p["status"]["phase"] == "Succeeded" for p in pods):
                self._condition(job_set, "Completed", "AllJobsCompleted", "jobset completed")
            return
        reason, message = _job_failure(job, failed[0])
        for pod in pods:  # the Job controller deletes the pods that still run
            if pod["status"]["phase"] in ("Pending", "Running"):
                self._end(pod["metadata"]["name"])
                self._delete_pod(pod)
        policy = spec["failurePolicy"]
        rule = next((r for r in policy["rules"] if reason in r["onJobFailureReasons"]), None)
        if rule and rule["action"] == "FailJobSet":
            self._condition(job_set, "Failed", "FailJobSetFailurePolicyAction", message)
        elif status["restarts"] >= policy["maxRestarts"]:
            text = "jobset failed due to reaching max number of restarts"
            self._condition(job_set, "Failed", "ReachedMaxRestarts", text)
        else:
            for pod in pods:  # a restart creates all Jobs of the JobSet anew
                self._delete_pod(pod)
            status["restarts"] += 1

    def _condition(self, job_set: dict, kind: str, reason: str, message: str) -> None:
        condition = {"type": kind, "status": "True", "reason": reason, "message": message}
        job_set["status"]["conditions"] = [condition]

    def _create_pod(self, job_set: dict, job: dict, index: int) -> None:
        name, template = job_set["metadata"]["name"], job["template"]
        labels = {
            **template["metadata"]["labels"],
            "jobset.sigs.k8s.io/jobset-name": name,
            "jobset.sigs.k8s.io/restart-attempt": str(job_set["status"]["restarts"]),
        }
        annotations = {**template["metadata"].get("annotations", {}), INDEX: str(index)}
        self.add(
            "pods",
            f"{name}-node-0-{index}-{uuid.uuid4().hex[:5]}",
            metadata={"labels": labels, "annotations": annotations},
            spec=template["spec"],
            status={"phase": "Pending"},
        )

    def _run(self, pod: dict) -> None:
        """Runs a pod as scheduler and kubelet would."""
        name, status = pod["metadata"]["name"], pod["status"]
        if status["phase"] == "Pending":
            if _index(pod) in self.pending:
                text = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
                condition = {"type": "PodScheduled", "status": "False", "message": text}
                status["conditions"] = [condition]
                return
            container = pod["spec"]["containers"][0]
            env = dict(_environment(pod, container))
            with open(self.root / "logs" / name, "wb") as log:
                self.processes[name] = subprocess.Popen(
                    [*container["command"], *container["args"]],
                    env={**_own_environment(), **env},
                    cwd=container.get("workingDir"),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            status.pop("conditions", None)
            status["phase"] = "Running"
        elif status["phase"] == "Running" and (code := self.processes[name].poll()) is not None:
            code = code if code >= 0 else 128 - code
            ended = {"exitCode": code, "reason": "Error" if code else "Completed"}
            status["containerStatuses"] = [{"name": "maxbench", "state": {"terminated": ended}}]
            status["phase"] = "Failed" if code else "Succeeded"

    def _end(self, name: str) -> None:
        """Sends SIGTERM to a pod's first process, and SIGKILL after the grace period."""
        if process := self.processes.get(name):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self.grace_s)
                return
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _delete_pod(self, pod: dict) -> None:
        with self.lock:
            self.objects.pop(("pods", pod["metadata"]["name"]), None)

    def delete_job_set(self, name: str) -> None:
        with self.lock:
            self.objects.pop(("jobsets", name), None)
            pods = self.listed("pods", f"jobset.sigs.k8s.io/jobset-name={name}")
        for pod in pods:
            self._end(pod["metadata"]["name"])
            self._delete_pod(pod)


def _index(pod: dict) -> int:
    return int(pod["metadata"]["annotations"][INDEX])


def _own_environment() -> dict[str, str]:
    """This environment without variables that only a node's image would set."""
    skipped = ("MB_", "SLURM", "JAX_", "XLA_", "NCCL_")
    return {k: v for k, v in os.environ.items() if not k.startswith(skipped)}


def _environment(pod: dict, container: dict) -> Iterator[tuple[str, str]]:
    """Variables of a container. An absent field is empty; a JobSet's host is this machine."""
    for entry in container["env"]:
        text = entry.get("value", "")
        if source := entry.get("valueFrom"):
            path = source["fieldRef"]["fieldPath"]
            match = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path)
            named = {"spec.nodeName": f"machine{_index(pod)}"}
            text = named.get(path) or pod["metadata"][match[1]].get(match[2], "")
        if entry["name"] == "MB_COORDINATOR":
            text = re.sub(r"^[^:]+", "127.0.0.1", text)
        yield entry["name"], text


def _job_failure(job: dict, pod: dict) -> tuple[str, str]:
    """Reason and message of a Job whose pod has failed, by its podFailurePolicy."""
    code = pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"]
    name = pod["metadata"]["name"]
    for number, rule in enumerate(job["podFailurePolicy"]["rules"]):
        true = {(c["type"], c["status"]) for c in pod["status"].get("conditions", [])}
        matches = any((c["type"], c["status"]) in true for c in rule.get("onPodConditions", []))
        if codes := rule.get("onExitCodes"):
            matches |= (code in codes["values"]) == (codes["operator"] == "In")
        if matches and rule["action"] == "FailJob":
            text = f"Container maxbench for pod team/{name} failed with exit code {code} matching "
            return "PodFailurePolicy", f"{text}FailJob rule at index {number}"
        if matches:
            break
    return "BackoffLimitExceeded", "Job has reached the specified backoff limit"


class _Handler(http.server.BaseHTTPRequestHandler):
    """The API's requests."""

    cluster: Cluster
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def _answer(self, content: dict | str, code: int = 200) -> None:
        body = content if isinstance(content, str) else json.dumps(content)
        self.send_response(code)
        kind = "text/plain" if isinstance(content, str) else "application/json"
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def _refuse(self, code: int, reason: str, message: str) -> None:
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code}
        self._answer({**status, "reason": reason, "message": message}, code)

    def _resource(self, path: str) -> tuple[str, str, str]:
        """(plural, name, subresource) of a path; '' for what it lacks."""
        match = re.fullmatch(
            r"/(?:api|apis)/(?:v1|[^/]+/[^/]+)(?:/namespaces/[^/]+)?/([a-z]+)(?:/([^/]+))?(?:/([a-z]+))?",
            path,
        )
        return tuple(text or "" for text in match.groups()) if match else ("", "", "")

    def do_GET(self):
        url = urllib.parse.urlparse(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        groups = [g for g in self.cluster.groups if "/" in g]
        if url.path == "/version":
            return self._answer({"major": "1", "minor": "33", "gitVersion": "v1.33.0"})
        if url.path == "/api":
            return self._answer({"kind": "APIVersions", "versions": ["v1"]})
        if url.path == "/apis":
            return self._answer({"kind": "APIGroupList", "apiVersion": "v1", "groups": [
                {"name": v["groupVersion"].split("/")[0], "versions": [v], "preferredVersion": v}
                for v in ({"groupVersion": g, "version": g.split("/")[1]} for g in groups)
            ]})  # fmt: skip
        version = url.path.removeprefix("/apis/").removeprefix("/api/")
        if version in self.cluster.groups:
            return self._answer({"kind": "APIResourceList", "groupVersion": version, "resources": [
                {"name": plural, "singularName": "", "namespaced": plural != "nodes", "kind": kind,
                 "verbs": ["create", "delete", "get", "list"]}
                for plural, (group, kind) in KINDS.items() if group == version]})  # fmt: skip
        if url.path == "/openapi/v3":
            paths = {f"apis/{g}": {"serverRelativeURL": f"/openapi/v3/apis/{g}"} for g in groups}
            return self._answer({"paths": paths})
        if url.path.startswith("/openapi/v3/"):
            group, version = JOBSET.split("/")
            patch = {"x-kubernetes-group-version-kind": {"group": group, "version": version,
                                                         "kind": "JobSet"},
                     "parameters": [{"name": "fieldValidation", "in": "query"}]}  # fmt: skip
            path = f"/apis/{JOBSET}/namespaces/{{namespace}}/jobsets/{{name}}"
            info = {"openapi": "3.0.0", "info": {"title": "K", "version": "1"}}
            return self._answer({**info, "paths": {path: {"patch": patch}}})
        plural, name, sub = self._resource(url.path)
        if plural not in KINDS:
            return self._refuse(404, "NotFound", f"{url.path} is not served")
        version, kind = KINDS[plural]
        if not name:
            items = self.cluster.listed(plural, query.get("labelSelector", ""))
            about = {"kind": f"{kind}List", "apiVersion": version, "metadata": {}}
            return self._answer({**about, "items": items})
        if not (item := self.cluster.objects.get((plural, name))):
            return self._refuse(404, "NotFound", f'{plural} "{name}" not found')
        if sub == "log":
            log = (self.cluster.root / "logs" / name).read_text(errors="replace")
            lines = log.splitlines(keepends=True)
            return self._answer("".join(lines[-int(query.get("tailLines", len(lines) or 1)) :]))
        return self._answer(item)

    def do_POST(self):
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        plural, _, _ = self._resource(urllib.parse.urlparse(self.path).path)
        name = content["metadata"]["name"]
        if self.cluster.refused:
            return self._refuse(422, "Invalid", self.cluster.refused)
        if (plural, name) in self.cluster.objects:
            return self._refuse(409, "AlreadyExists", f'{plural} "{name}" already exists')
        fields = {k: v for k, v in content.items() if k not in ("apiVersion", "kind")}
        return self._answer(self.cluster.add(plural, name, **fields), 201)

    def do_DELETE(self):
        if length := int(self.headers.get("Content-Length") or 0):
            self.rfile.read(length)
        plural, name, _ = self._resource(urllib.parse.urlparse(self.path).path)
        if (plural, name) not in self.cluster.objects:
            return self._refuse(404, "NotFound", f'{plural} "{name}" not found')
        threading.Thread(target=self.cluster.delete_job_set, args=(name,)).start()
        return self._answer({"kind": "Status", "apiVersion": "v1", "status": "Success"})


@contextlib.contextmanager
def cluster(root: pathlib.Path, **options) -> Iterator[Cluster]:
    """A cluster for as long as the block lasts."""
    started = Cluster(root, **options)
    try:
        yield started
    finally:
        started.stop()


def wait(done, seconds: float, what: str) -> None:
    """Waits for a condition.

    Raises:
      RuntimeError: it did not become true in time.
    """
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            raise RuntimeError(f"{what} within {seconds:.0f} s")
        time.sleep(0.1)
