"""The recipes for clusters: what they set fits together, and Open MPI runs its own."""

import ast
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml

from jaxfl.cli import launch

RECIPES = pathlib.Path(__file__).parents[2] / "docs/clusters"
GUIDE = RECIPES.parent / "guides/clusters.md"
SERVICE, JOB = yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text())
POD = JOB["spec"]["template"]["spec"]


def options(text):
    """Return the options of a script's launcher by name, and the words of its command."""
    (command,) = re.findall(r"python -m jaxfl launch (.*)", text.replace("\\\n", " "))
    return dict(re.findall(r"--(\w+) (\S+)", command)), shlex.split(command)


def test_the_guide_shows_every_recipe():
    shown = re.findall(r"literalinclude\} \.\./clusters/(\S+)", GUIDE.read_text())
    assert sorted(shown) == sorted(path.name for path in RECIPES.iterdir() if path.is_file())


@pytest.mark.parametrize("name", ["slurm.sbatch", "openmpi.sh"])
def test_shells_read_the_scripts(name):
    subprocess.run(["bash", "-n", str(RECIPES / name)], check=True)


def test_slurm_starts_one_task_per_node_and_time_remains_to_save():
    text = (RECIPES / "slurm.sbatch").read_text()
    set_ = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, re.MULTILINE))
    assert set_["ntasks-per-node"] == "1"
    # A run looks for signals after at most ten seconds, and may have a round that takes longer.
    name, seconds = set_["signal"].split("@")
    assert name == "TERM"
    assert int(seconds) >= 60
    assert "requeue" in set_
    assert options(text)[1] == ["run.py", "$@"]


def test_the_pods_of_kubernetes_meet():
    text = POD["containers"][0]["args"][0]
    given, words = options(text)
    assert JOB["spec"]["completionMode"] == "Indexed"
    assert given["process"] == '"$JOB_COMPLETION_INDEX"'
    assert int(given["processes"]) == JOB["spec"]["completions"] == JOB["spec"]["parallelism"]
    # The name of a pod is that of its job, its index, and the service that is its subdomain.
    service = SERVICE["metadata"]["name"]
    assert SERVICE["spec"]["clusterIP"] == "None"
    assert POD["subdomain"] == service
    assert SERVICE["spec"]["selector"] == {"job-name": JOB["metadata"]["name"]}
    host, port = given["coordinator"].split(":")
    assert host == f"{JOB['metadata']['name']}-0.{service}"
    assert f"getent hosts {host} " in text
    variables = {entry["name"]: entry.get("value") for entry in POD["containers"][0]["env"]}
    assert variables[launch._BIND] == f"$(POD_IP):{port}"
    mounts = {mount["name"] for mount in POD["containers"][0]["volumeMounts"]}
    assert mounts == {volume["name"] for volume in POD["volumes"]}
    assert words[-2:] == ["run.py", "/shared/runs/first"]


def test_kubernetes_counts_no_stop_as_a_failure_and_ends_a_job_with_wrong_options():
    rules = {}
    for rule in JOB["spec"]["podFailurePolicy"]["rules"]:
        for code in rule.get("onExitCodes", {}).get("values", []):
            rules[code] = rule["action"]
    assert rules == {2: "FailJob", 130: "Ignore", 143: "Ignore"}
    # A policy needs this.
    assert POD["restartPolicy"] == "Never"


def test_ray_calls_the_program_as_its_command_does():
    tree = ast.parse((RECIPES / "ray_train.py").read_text())
    imported = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    # The driver does not start JAX.
    assert not any(str(name).startswith(("jax", "jaxfl")) for name in imported)
    called = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert "jaxfl.configure()" in called
    assert "run.main(config['folder'], *config['rounds'])" in called


@pytest.mark.slow
@pytest.mark.xdist_group("hosts")
@pytest.mark.skipif(not shutil.which("mpirun"), reason="there is no mpirun")
def test_open_mpi_runs_its_recipe(tmp_path, monkeypatch):
    shutil.copytree(RECIPES, tmp_path, dirs_exist_ok=True)
    script = tmp_path / "openmpi.sh"
    # One machine stands for two hosts.
    script.write_text(script.read_text().replace("ppr:1:node", "ppr:2:node"))
    (tmp_path / "hosts").write_text("# a comment\nlocalhost slots=2\n")
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT"):
        monkeypatch.setenv(name, "1")
        monkeypatch.setenv(f"{name}_CONFIRM", "1")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    monkeypatch.setenv("PYTHONPATH", str(RECIPES.parents[1]))
    # The script calls the Python that runs this test.
    folder = pathlib.Path(sys.executable).parent
    monkeypatch.setenv("PATH", os.pathsep.join((str(folder), os.environ["PATH"])))
    command = ["bash", "openmpi.sh", "hosts", "out", "2"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "at epsilon 8.00" in ended.stdout
    rows = (tmp_path / "out/metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["round"] == 2
