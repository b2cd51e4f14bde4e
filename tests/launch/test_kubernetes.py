"""JobSets: what the manifests contain, and whether Kubernetes' own schemas accept them."""

import json
import os
import re
import time

import kubernetes_validate
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

from maxbench.config import recipes
from maxbench.config.errors import UserError
from maxbench.launch import jobs, kubernetes, variables
from tests.launch.test_launch import dry_run

PLAIN = {
    "CLUSTER_TYPE": "kubernetes",
    "RUN_CONF_IMAGE": "registry.example/maxbench:1",
    "JOB_TOTAL_GPUS": "16",
}
A3_ULTRA = PLAIN | {"GPU_TYPE": "h200", "K8S_NETWORK": "gke-a3-ultra"}
CLAIM = {"RUN_CONF_MOUNTS": "results:/results:my-claim", "PVC_DIR": "/results"}
ALL = A3_ULTRA | CLAIM | {
    "CHECKPOINT_EVERY": "10", "K8S_NAMESPACE": "team-a", "K8S_CODE": "/opt/maxbench",
    "K8S_RESOURCES": "rdma/ib=1;vendor.example/nic", "K8S_ANNOTATIONS": "a.example/b=c d",
    "K8S_NODE_SELECTOR": "pool=gpu", "K8S_TOLERATIONS": "nvidia.com/gpu;spot=true:NoSchedule",
    "K8S_QUEUE": "queue", "K8S_TOPOLOGY": "required=cloud.google.com/gce-topology-block",
    "K8S_PRIORITY": "high", "K8S_CLAIM": "imex", "K8S_HOST_NETWORK": "true",
    "K8S_SERVICE_ACCOUNT": "me", "EXCLUDE_NODES": "n1,n2", "ENABLE_PROFILE": "true",
    "ENABLE_NCCL_TRACE": "true",
}  # fmt: skip
# Releases of Kubernetes with the current form of resourceClaims.
RELEASES = ("1.31", "1.34", "1.37")


def manifest(env: dict[str, str], kind: str = "", stamp: int = 1795757500) -> dict:
    return kubernetes.manifest(variables.resolve_job(env), kind, stamp)


def job_of(job_set: dict) -> dict:
    return job_set["spec"]["replicatedJobs"][0]["template"]["spec"]


def pod_of(job_set: dict) -> dict:
    return job_of(job_set)["template"]["spec"]


def container_of(job_set: dict) -> dict:
    (container,) = pod_of(job_set)["containers"]
    return container


def values(job_set: dict) -> dict[str, str]:
    return {e["name"]: e["value"] for e in container_of(job_set)["env"] if "value" in e}


def assert_accepted(job_set: dict) -> None:
    """By the models of JobSet's OpenAPI schema, and by Kubernetes' own schema of the Job."""
    model = JobsetV1alpha2JobSet.from_dict(json.loads(json.dumps(job_set)))
    assert model.to_dict() == job_set  # the model drops a field that it does not know
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
    for release in RELEASES:
        kubernetes_validate.validate(job | {"spec": job_of(job_set)}, release, strict=True)


@pytest.mark.parametrize("kind", ["", "nsys", "nccltrace"])
@pytest.mark.parametrize(
    "env",
    [PLAIN, A3_ULTRA, ALL, PLAIN | {"PROCESSES": "node"}, PLAIN | {"K8S_PRIORITY": "p"},
     PLAIN | {"CPU_DEVICES": "4", "JOB_TOTAL_GPUS": "8", "PRESET": "tiny"},
     PLAIN | CLAIM | {"GPU_TYPE": "b200", "K8S_NETWORK": "gke-a4", "CHECKPOINT_EVERY": "5",
                      "MODEL": "nemotron4", "JOB_TOTAL_GPUS": "128"}],
    ids=["plain", "a3-ultra", "all", "process-per-node", "priority", "cpu", "a4"],
)  # fmt: skip
def test_the_schemas_of_jobset_and_kubernetes_accept_the_manifest(env, kind):
    assert_accepted(manifest(env | {"K8S_CODE": "/opt/maxbench"}, kind))


def test_schemas_refuse_what_kubernetes_would():
    """The check above finds a misspelt field and a value of another type."""
    for change in (
        lambda x: x["spec"].update(failurePolicie={}),
        lambda x: x["spec"]["failurePolicy"].update(maxRestarts="3"),
        lambda x: job_of(x).update(backOffLimit=0),
        lambda x: container_of(x).update(args=[1]),
    ):
        job_set = manifest(PLAIN)
        change(job_set)
        with pytest.raises((AssertionError, ValueError, kubernetes_validate.ValidationError)):
            assert_accepted(job_set)


def test_one_pod_per_node_and_one_process_per_gpu():
    job_set = manifest(PLAIN)
    job, env = job_of(job_set), values(job_set)
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (2, 2, "Indexed")
    assert (env["MB_NODES"], env["MB_TASKS_PER_NODE"], env["MB_GPUS"]) == ("2", "8", "8")
    assert container_of(job_set)["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    per_node = values(manifest(PLAIN | {"PROCESSES": "node"}))
    assert "MB_TASKS_PER_NODE" not in per_node  # the default: one
    part = container_of(manifest(PLAIN | {"JOB_TOTAL_GPUS": "4", "PRESET": "tiny"}))
    assert part["resources"]["limits"] == {"nvidia.com/gpu": "4"}


def test_the_coordinator_is_the_pod_with_index_0():
    job_set = manifest(PLAIN)
    name, env = job_set["metadata"]["name"], container_of(job_set)["env"]
    host, _, port = values(job_set)["MB_COORDINATOR"].partition(":")
    assert host == f"{name}-node-0-0.{name}"
    assert 61440 <= int(port) < 65535  # the run uses the next one
    fields = {e["name"]: e["valueFrom"]["fieldRef"]["fieldPath"] for e in env if "valueFrom" in e}
    index = "batch.kubernetes.io/job-completion-index"
    assert fields["MB_NODE_INDEX"] == f"metadata.annotations['{index}']"
    assert fields["MB_ATTEMPT"] == "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
    assert job_set["spec"]["network"]["publishNotReadyAddresses"] is True
    assert values(job_set)["MB_START_TIMEOUT_S"] == "3600"
    one = values(manifest(PLAIN | {"JOB_TOTAL_GPUS": "8", "PROCESSES": "node"}))
    assert not {"MB_COORDINATOR", "MB_START_TIMEOUT_S"} & one.keys()


def test_a3_ultra_gets_its_networks_and_a_plain_cluster_its_resource():
    job_set = manifest(A3_ULTRA)
    annotations = job_of(job_set)["template"]["metadata"]["annotations"]
    interfaces = json.loads(annotations["networking.gke.io/interfaces"])
    rdma = [f"rdma-{i}" for i in range(8)]
    assert [x["network"] for x in interfaces] == ["default", "gvnic-1", *rdma]
    assert [x["interfaceName"] for x in interfaces] == [f"eth{i}" for i in range(10)]
    assert pod_of(job_set)["nodeSelector"] == {
        "cloud.google.com/gke-accelerator": "nvidia-h200-141gb"
    }
    paths = {v["hostPath"]["path"] for v in pod_of(job_set)["volumes"] if "hostPath" in v}
    assert paths == {"/home/kubernetes/bin/nvidia", "/home/kubernetes/bin/gib"}
    assert values(job_set)["MB_SOURCE"] == "/usr/local/gib/scripts/set_nccl_env.sh"
    plain = container_of(manifest(PLAIN | {"K8S_RESOURCES": "rdma/ib=1"}))
    assert plain["resources"]["limits"] == {"nvidia.com/gpu": "8", "rdma/ib": "1"}
    for container in (container_of(job_set), plain):
        assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert "securityContext" not in container_of(manifest(PLAIN))


def test_volumes_queue_and_placement():
    job_set = manifest(ALL)
    volumes = {v["name"]: v for v in pod_of(job_set)["volumes"]}
    mounts = {m["mountPath"]: volumes[m["name"]] for m in container_of(job_set)["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"] == {"medium": "Memory"}
    assert mounts["/results"]["persistentVolumeClaim"] == {"claimName": "my-claim"}
    labels = job_set["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "queue"
    assert labels["kueue.x-k8s.io/priority-class"] == "high"
    annotations = job_of(job_set)["template"]["metadata"]["annotations"]
    topology = "kueue.x-k8s.io/podset-required-topology"
    assert annotations[topology] == "cloud.google.com/gce-topology-block"
    assert annotations["a.example/b"] == "c d"
    affinity = pod_of(job_set)["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"][0]["values"] == ["n1", "n2"]
    assert pod_of(job_set)["tolerations"][1] == {
        "key": "spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}  # fmt: skip
    args = container_of(job_set)["args"]
    assert args[args.index("--output_dir") + 1] == "/results"
    assert values(job_set)["JAX_COMPILATION_CACHE_DIR"].startswith("/results/cache/maxbench-")
    other = manifest(PLAIN | {"K8S_PRIORITY": "high", "RUN_CONF_MOUNTS": "/mnt/ssd:/ssd"})
    assert pod_of(other)["priorityClassName"] == "high"
    assert {"hostPath": {"path": "/mnt/ssd"}}.items() <= pod_of(other)["volumes"][1].items()


def test_failures_that_would_come_again_end_the_job():
    policy = manifest(PLAIN)["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 20
    assert policy["rules"][0]["action"] == "FailJobSet"
    disrupted, failed = job_of(manifest(PLAIN))["podFailurePolicy"]["rules"]
    assert disrupted["action"] == "Count"  # before the exit code: a preempted pod restarts the job
    assert failed["onExitCodes"]["values"] == [75, 143]
    saves = job_of(manifest(PLAIN | CLAIM | {"CHECKPOINT_EVERY": "5"}))["podFailurePolicy"]
    assert saves["rules"][1]["onExitCodes"]["values"] == [75, 137, 143]
    assert job_of(manifest(PLAIN))["backoffLimit"] == 0
    assert pod_of(manifest(PLAIN))["restartPolicy"] == "Never"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RUN_CONF_IMAGE": ""}, "RUN_CONF_IMAGE is not set, and Kubernetes needs it"),
        ({"RUN_CONF_IMAGE": "/x/y.sqsh"}, "RUN_CONF_IMAGE='/x/y.sqsh' is a file, and Kubernetes"),
        (
            {"RUN_CONF_IMAGE": "docker://me@nvcr.io#nvidia/jax:1"},
            "is enroot's form, and Kubernetes needs docker's: RUN_CONF_IMAGE=nvcr.io/nvidia/jax:1",
        ),
        ({"RUN_CONF_MOUNTS": "a:b"}, "RUN_CONF_MOUNTS: 'a:b' is neither name:path:claim"),
        ({"PVC_DIR": "/r"}, "PVC_DIR='/r' is in none of the mounted paths: none"),
        ({"CHECKPOINT_EVERY": "5"}, "a run with checkpoints needs a volume that keeps them"),
        ({"K8S_NETWORK": "gke-a3-ultra"}, "is of machines with h200, and GPU_TYPE is 'h100'"),
        (
            {"K8S_NETWORK": "gke-a4", "GPU_TYPE": "b200", "JOB_TOTAL_GPUS": "4", "PRESET": "tiny"},
            "gives a pod all NICs of a node, and JOB_TOTAL_GPUS=4 uses 4 of its 8 GPUs",
        ),
        ({"K8S_NETWORK": "gke"}, "K8S_NETWORK='gke' is not one of gke-a3-ultra, gke-a4"),
        ({"K8S_TOPOLOGY": "block"}, "K8S_TOPOLOGY='block' must be required=LABEL or preferred="),
        ({"K8S_RESOURCES": "rdma ib"}, "K8S_RESOURCES: 'rdma ib' is not key=value"),
        ({"K8S_NODE_SELECTOR": "pool"}, "K8S_NODE_SELECTOR: 'pool' is not key=value"),
        ({"K8S_TOLERATIONS": "a:Never"}, "K8S_TOLERATIONS: 'a:Never' is not key, key=value"),
        ({"K8S_QUEUE": "Big Queue"}, "K8S_QUEUE='Big Queue' must be lower-case letters"),
        ({"MAX_RESTARTS": "100"}, "MAX_RESTARTS=100 must be below 100"),
        ({"ENABLE_PROFILE": "true"}, "PROFILER='nsys' needs launch/task.sh of a checkout"),
    ],
)
def test_what_kubernetes_cannot_run_is_refused(env, message):
    output = dry_run(code=2, **(PLAIN | env))
    assert message in output
    assert output.count("\n") == 1


def test_a_workload_file_of_this_machine_is_refused(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text((recipes.ROOT / "configs" / "llama31_8b.py").read_text())
    env = PLAIN | {"MODEL": str(file), "STAGE_PATH": str(tmp_path)}
    assert "is a file of this machine, which the pods do not see" in dry_run(code=2, **env)
    mounted = env | {"RUN_CONF_MOUNTS": f"here:{tmp_path}:claim"}
    assert f"- {file}\n" in dry_run(**mounted)


def test_dry_run_prints_manifests(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1795757512.0)
    output = dry_run(**PLAIN, DTYPE="bf16 fp8", REPEATS="2", XLA_FLAGS="--xla_gpu_x=1")
    documents = [d for d in yaml.safe_load_all(output) if d]
    assert [d["kind"] for d in documents] == ["JobSet", "JobSet"]
    names = [d["metadata"]["name"] for d in documents]
    assert names == [f"maxbench-llama31-8b-{dtype}-16g-tp5bcs" for dtype in ("bf16", "fp8")]
    assert "# 2 x pretrain_llama31_8b_bf16_gpus16" in output
    assert "llama31_8b" in container_of(documents[0])["args"]  # by name: of the installed package
    assert values(documents[0])["XLA_FLAGS"] == "--xla_gpu_x=1"
    in_code = yaml.safe_load(dry_run(**PLAIN, K8S_CODE="/opt/mb"))
    assert "llama31_8b" in container_of(in_code)["args"]
    assert container_of(in_code)["workingDir"] == "/opt/mb"


@given(
    model=st.text("abAB09._+-", min_size=1, max_size=70),
    stamp=st.integers(0, 10**11),
    kind=st.sampled_from(["", "nsys", "nccltrace"]),
)
@settings(max_examples=50, deadline=None)
def test_names_are_what_jobset_accepts(model, stamp, kind):
    """JobSet refuses names whose pods' names would have more than 63 characters."""
    env = PLAIN | {"K8S_CODE": "/x"}
    try:
        s = variables.resolve_job(env, [f"--config.model.name={model}"])
    except UserError:
        return
    name = kubernetes.job_set_name(s, kind, stamp)
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert len(f"{name}-node-0-9999-abcde") <= 63


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 1800), ("00:30:00", 1800), ("90:30", 5430), ("2-0", 172800), ("1-01:30", 91800)],
)
def test_time_limits_in_slurms_notation(text, seconds):
    assert jobs.seconds(text) == seconds


EXAMPLES = {
    "jobset_gke_a3_ultra.yaml": A3_ULTRA
    | {
        "K8S_QUEUE": "gpus",
        "K8S_TOPOLOGY": "required=cloud.google.com/gce-topology-block",
        "CHECKPOINT_EVERY": "20",
        "RUN_CONF_MOUNTS": "results:/results:maxbench-results",
        "PVC_DIR": "/results",
    },
    "jobset_plain.yaml": PLAIN | {"K8S_RESOURCES": "rdma/ib=1"},
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_manifests_in_the_docs_are_of_this_revision(name, monkeypatch):
    """If not: UPDATE_DOCS=1 python -m pytest tests/launch/test_kubernetes.py."""
    monkeypatch.setattr(time, "time", lambda: 1795757512.0)
    file = recipes.ROOT / "docs" / "how-to" / name
    output = dry_run(**EXAMPLES[name])
    if os.environ.get("UPDATE_DOCS"):
        file.write_text(output)
    assert file.read_text() == output
