"""Recipes for Kubernetes and SLURM: what their schemas and schedulers would refuse is found here."""

import copy
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

HERE = Path(__file__).parent
RECIPES = HERE.parents[1] / "recipes"
MANIFESTS = sorted((RECIPES / "k8s").glob("*.yaml"))
SCRIPTS = sorted((RECIPES / "slurm").glob("*.sbatch"))


def load(file: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(file.read_text()))


def schema(file: Path) -> dict[str, Any]:
    return dict(json.loads((HERE / "schemas" / f"{file.stem}.json").read_text()))


def pod_of(manifest: dict[str, Any]) -> dict[str, Any]:
    spec = manifest["spec"]
    if manifest["kind"] == "PyTorchJob":
        return dict(spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"])
    return dict(spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"])


def test_there_are_recipes_to_check() -> None:
    assert [file.name for file in MANIFESTS] == ["jobset.yaml", "pytorchjob.yaml"]
    assert [file.name for file in SCRIPTS] == ["finetune.sbatch", "train.sbatch"]


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.stem)
def test_a_manifest_obeys_its_schema(file: Path) -> None:
    jsonschema.Draft202012Validator.check_schema(schema(file))
    jsonschema.validate(load(file), schema(file), cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.stem)
def test_the_schema_bites(file: Path) -> None:
    misspelt = copy.deepcopy(load(file))
    misspelt["spec"]["failurPolicy"] = {}
    without_image = copy.deepcopy(load(file))
    del pod_of(without_image)["containers"][0]["image"]
    for wrong in (misspelt, without_image):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema(file), cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.stem)
def test_a_pod_can_save_before_it_goes_and_share_what_it_saved(file: Path) -> None:
    pod = pod_of(load(file))
    (container,) = pod["containers"]
    assert pod["terminationGracePeriodSeconds"] >= 60
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert any("persistentVolumeClaim" in volume for volume in pod["volumes"])
    assert {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} <= {variable["name"] for variable in container["env"]}


def test_pytorchjob_starts_a_process_per_gpu_on_every_node() -> None:
    spec = load(RECIPES / "k8s" / "pytorchjob.yaml")["spec"]
    (container,) = pod_of({"kind": "PyTorchJob", "spec": spec})["containers"]
    assert container["name"] == "pytorch"  # the operator looks for it
    assert int(spec["nprocPerNode"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    elastic, replicas = spec["elasticPolicy"], spec["pytorchReplicaSpecs"]["Worker"]["replicas"]
    assert elastic["minReplicas"] <= replicas <= elastic["maxReplicas"]


def test_jobset_counts_nodes_and_gpus_once() -> None:
    manifest = load(RECIPES / "k8s" / "jobset.yaml")
    (job,) = manifest["spec"]["replicatedJobs"]
    (container,) = pod_of(manifest)["containers"]
    options = dict(word.removeprefix("--").split("=") for word in container["command"] if word.startswith("--"))
    assert int(options["nnodes"]) == job["template"]["spec"]["parallelism"] == job["template"]["spec"]["completions"]
    assert int(options["nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    name = manifest["metadata"]["name"]
    assert options["master-addr"] == f"{name}-{job['name']}-0-0.{name}"
    assert int(options["master-port"]) == container["ports"][0]["containerPort"]


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.stem)
def test_a_batch_script_is_shell_with_a_task_per_gpu(file: Path) -> None:
    text = file.read_text()
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, flags=re.MULTILINE))
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert "srun --kill-on-bad-exit=1" in text
    bash = shutil.which("bash")
    assert bash is not None
    assert subprocess.run([bash, "-n", str(file)], check=False).returncode == 0


def test_a_preempted_script_is_signalled_and_queued_again() -> None:
    text = (RECIPES / "slurm" / "train.sbatch").read_text()
    assert "#SBATCH --requeue\n" in text
    assert re.search(r"^#SBATCH --signal=USR1@\d+$", text, flags=re.MULTILINE)  # to the tasks, not B: to the shell
    assert "#SBATCH --open-mode=append\n" in text  # the next run does not erase this one's output
