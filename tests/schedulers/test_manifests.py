"""The manifests in ``examples/kubernetes``: they match the schemas, and their command lines mean the right run.

Objects of Kubernetes itself, and the pods and Jobs within other kinds, are checked against the published schemas (the
package kubernetes-validate). No package has those of JobSet, LeaderWorkerSet and Kubeflow: ``KINDS`` has the fields
around the pods, written after their definitions (JobSet v1alpha2, LeaderWorkerSet v1, Trainer v1alpha1, Training
Operator 1.9).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tenax._schedulers.kubernetes import IndexedJob
from tenax.cli.arguments import read
from tenax.cli.options import Options, decide
from tenax.cli.scheduled_run import find_allocation
from tenax.scheduler import find_scheduler

kubernetes_validate = pytest.importorskip("kubernetes_validate")
jsonschema = pytest.importorskip("jsonschema")
yaml = pytest.importorskip("yaml")

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
NUMBER, TEXT, TEXTS = {"type": "integer"}, {"type": "string"}, {"type": "array", "items": {"type": "string"}}
SWITCH, POD, JOB = {"type": "boolean"}, {"type": "object", "x-kind": "PodTemplate"}, {"type": "object", "x-kind": "Job"}


def fields(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def one_of(*values: str) -> dict[str, Any]:
    return {"enum": list(values)}


NETWORK = fields(enableDNSHostnames=SWITCH, publishNotReadyAddresses=SWITCH, subdomain=TEXT)
REPLICATED_JOBS = {
    "type": "array",
    "items": {**fields(name=TEXT, replicas=NUMBER, template=JOB), "required": ["name", "template"]},
}
KINDS = {
    "jobset.x-k8s.io/v1alpha2 JobSet": fields(
        network=NETWORK, failurePolicy=fields(maxRestarts=NUMBER), replicatedJobs=REPLICATED_JOBS
    ),
    "leaderworkerset.x-k8s.io/v1 LeaderWorkerSet": fields(
        replicas=NUMBER,
        startupPolicy=one_of("LeaderCreated", "LeaderReady"),
        leaderWorkerTemplate=fields(
            size=NUMBER,
            restartPolicy=one_of("RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"),
            workerTemplate=POD,
        ),
    ),
    "trainer.kubeflow.org/v1alpha1 TrainingRuntime": fields(
        mlPolicy=fields(numNodes=NUMBER, torch=fields()),
        template=fields(spec=fields(network=NETWORK, replicatedJobs=REPLICATED_JOBS)),
    ),
    "trainer.kubeflow.org/v1alpha1 TrainJob": fields(
        runtimeRef={**fields(name=TEXT, kind=TEXT), "required": ["name"]},
        trainer=fields(numNodes=NUMBER, numProcPerNode=NUMBER, command=TEXTS, args=TEXTS),
    ),
    "kubeflow.org/v1 PyTorchJob": fields(
        nprocPerNode=TEXT,
        elasticPolicy=fields(rdzvBackend=TEXT, rdzvId=TEXT, minReplicas=NUMBER, maxReplicas=NUMBER, maxRestarts=NUMBER),
        pytorchReplicaSpecs=fields(
            Worker=fields(
                replicas=NUMBER, restartPolicy=one_of("Always", "OnFailure", "Never", "ExitCode"), template=POD
            )
        ),
    ),
}
MANIFESTS = [
    pytest.param(manifest, id=f"{path.stem}-{manifest['kind']}")
    for path in sorted(FOLDER.glob("*.yaml"))
    for manifest in yaml.safe_load_all(path.read_text())
]


def templates(value: Any, schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pods and Jobs within an object, each as an object of its own."""
    if kind := schema.get("x-kind"):
        named = {"metadata": {"name": "name"}, **value}
        if kind == "Job":
            return [{"apiVersion": "batch/v1", "kind": kind, **named}]
        return [{"apiVersion": "v1", "kind": kind, "metadata": {"name": "name"}, "template": value}]
    if isinstance(value, list):
        return [found for each in value for found in templates(each, schema["items"])]
    if isinstance(value, dict):
        return [found for name, each in value.items() for found in templates(each, schema["properties"][name])]
    return []


def pods(value: Any) -> list[dict[str, Any]]:
    """Return the specifications of the pods in a manifest."""
    if isinstance(value, dict):
        here = [value] if "containers" in value else []
        return here + [found for each in value.values() for found in pods(each)]
    return [found for each in value for found in pods(each)] if isinstance(value, list) else []


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_a_manifest_matches_its_schema(manifest: dict[str, Any]) -> None:
    schema = KINDS.get(f"{manifest['apiVersion']} {manifest['kind']}")
    objects = [manifest]
    if schema is not None:
        assert manifest.keys() == {"apiVersion", "kind", "metadata", "spec"}
        jsonschema.validate(manifest["spec"], schema)
        objects = templates(manifest["spec"], schema)
        assert objects or manifest["kind"] == "TrainJob"
    for each in objects:
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)


def test_the_schemas_reject_unknown_fields() -> None:
    manifest = yaml.safe_load((FOLDER / "leader-worker-set.yaml").read_text())
    pods(manifest)[0]["containers"][0]["comand"] = ["tenax"]
    with pytest.raises(jsonschema.ValidationError, match="comand"):
        test_a_manifest_matches_its_schema(manifest)
    manifest["spec"]["sise"] = 4
    with pytest.raises(jsonschema.ValidationError, match="sise"):
        test_a_manifest_matches_its_schema(manifest)


@pytest.mark.parametrize("manifest", [each for each in MANIFESTS if pods(each.values[0])])
def test_pods_are_restricted_probed_and_have_time_to_save(manifest: dict[str, Any]) -> None:
    for pod in pods(manifest):
        (container,) = pod["containers"]
        assert container["command"] == ["tenax", "run"]  # process 1
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]
        assert container["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "health"}
        assert pod["terminationGracePeriodSeconds"] > 50  # --shutdown-timeout of all manifests


def options(name: str, environ: dict[str, str], pod_name: str = "") -> Options:
    """Return the options of a pod's command line, with the variables that its controller sets. The pod has 8 GPUs."""
    manifests = list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()))
    args = pods(manifests)[0]["containers"][0].get("args") or manifests[-1]["spec"]["trainer"]["args"]
    environ = {key: "8" if value == "gpu" else value for key, value in environ.items()}
    reading = read(["8" if arg == "gpu" else arg for arg in args], environ)
    scheduler = IndexedJob(lambda: pod_name) if pod_name else find_scheduler(environ)
    allocation = None
    if scheduler is not None:
        allocation = find_allocation(scheduler, reading, environ)
    return decide(reading, environ, allocation)


@pytest.mark.parametrize(
    ("name", "environ", "pod_name", "expected"),
    [
        (
            "indexed-job",
            {"JOB_COMPLETION_INDEX": "3"},
            "train-3.train.default.svc.cluster.local",
            (2, 4, "train", "train-0.train.default.svc.cluster.local:29400", {"node_order": "3"}),
        ),
        (
            "jobset",
            {"JOB_COMPLETION_INDEX": "1"},
            "train-node-0-1.train.default.svc.cluster.local",
            (2, 4, "train-node-0", "train-node-0-0.train.default.svc.cluster.local:29400", {"node_order": "1"}),
        ),
        (
            "leader-worker-set",
            {"LWS_LEADER_ADDRESS": "train-0.train.default", "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "2"},
            "",
            (4, 4, "train-0", "train-0.train.default:29400", {"node_order": "2"}),
        ),
        (
            "kubeflow-trainer",
            {
                "PET_NNODES": "4",
                "PET_NPROC_PER_NODE": "8",
                "PET_NODE_RANK": "2",
                "PET_MASTER_ADDR": "train-node-0-0.train",
                "PET_MASTER_PORT": "29500",
                "JOB_COMPLETION_INDEX": "2",
            },
            "train-node-0-2.train.default.svc.cluster.local",
            (4, 4, "train-node-0", "train-node-0-0.train:29500", {"rank": 2}),
        ),
        (
            "pytorch-job",
            {
                "PYTHONUNBUFFERED": "1",
                "PET_NPROC_PER_NODE": "gpu",
                "PET_RDZV_ENDPOINT": "train-worker-0:23456",
                "PET_RDZV_BACKEND": "c10d",
                "PET_NNODES": "2:4",
                "PET_MAX_RESTARTS": "3",
                "PET_RDZV_ID": "train",
            },
            "",
            (2, 4, "train", "train-worker-0:23456", {}),
        ),
    ],
)
def test_the_pods_of_a_manifest_are_one_run(
    name: str, environ: dict[str, str], pod_name: str, expected: tuple[Any, ...]
) -> None:
    found = options(name, environ, pod_name)
    where = (found.min_nodes, found.max_nodes, found.run_id, found.rdzv_endpoint, found.rdzv_configs)
    assert where == expected
    assert (found.nproc_per_node, found.max_restarts, found.shutdown_timeout) == (8, 3, 50)
