"""The recipes in `cluster/`: what can be said of them without the systems that they are for."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import dask
import pytest
import yaml
from clusters import forked
from commands import python
from dask.utils import parse_bytes
from distributed import Scheduler, Security

import multimm
import multimm.cluster as mc
from multimm.errors import ClusterError, OptionError

ROOT = Path(multimm.__file__).parents[1]
CLUSTER = ROOT / "cluster"
#: Keys of configuration that only the GPU packages define.
ELSEWHERE = {("distributed-ucxx", "environment")}


def load(path: Path) -> ModuleType:
    """A recipe as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def documents(name: str) -> list[dict]:
    return list(yaml.safe_load_all((CLUSTER / "kubernetes" / name).read_text()))


def leaves(tree: dict, path: tuple[str, ...] = ()):
    """Path and value of each setting."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


# ----------------------------------------------------------------------- all


@pytest.mark.parametrize("readme", sorted(CLUSTER.rglob("README.md")), ids=lambda p: p.parent.name)
def test_named_files_exist(readme):
    """Its links lead somewhere: tests/test_docs.py."""
    for name in re.findall(r"\b[a-z_-]+\.(?:py|sbatch)\b", readme.read_text()):
        assert list(CLUSTER.rglob(name)), name


# ----------------------------------------------------------------------- tls


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """The certificates of two clusters."""
    make = load(CLUSTER / "tls" / "make_certificates.py")
    folders = [tmp_path_factory.mktemp("tls") / name for name in ("own", "other")]
    for folder in folders:
        make.main([str(folder)])
    return folders


def security(authority: Path, client: Path) -> Security:
    return Security(
        require_encryption=True,
        tls_ca_file=str(authority / "ca.pem"),
        tls_client_cert=str(client / "client.pem"),
    )


def test_keys_are_for_their_owner_alone(certificates):
    own, _ = certificates
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in own.iterdir()}
    secret = {"ca-key.pem", "scheduler.pem", "worker.pem", "client.pem"}
    assert set(modes) == secret | {"ca.pem", "dask-tls.yaml"}
    assert {name for name, mode in modes.items() if mode == 0o600} == secret
    assert "PRIVATE" not in (own / "ca.pem").read_text()


def test_certificates_in_use_are_not_overwritten(certificates, capsys):
    own, _ = certificates
    before = (own / "ca.pem").read_bytes()
    for arguments, said in (([str(own)], "not empty"), ([str(own), "--days", "0"], "at least 1")):
        with pytest.raises(SystemExit):
            load(CLUSTER / "tls" / "make_certificates.py").main(arguments)
        assert said in capsys.readouterr().err
    assert (own / "ca.pem").read_bytes() == before


def test_a_clients_certificate_makes_no_worker(certificates):
    own, _ = certificates
    command = ["openssl", "verify", "-CAfile", str(own / "ca.pem"), "-purpose", "sslserver"]
    if shutil.which("openssl") is None:
        pytest.skip("no command openssl")
    for role, accepted in (("client", False), ("worker", True), ("scheduler", True)):
        done = subprocess.run([*command, str(own / f"{role}.pem")], capture_output=True)
        assert (done.returncode == 0) == accepted, role


@pytest.fixture(scope="module")
def address(certificates):
    """A cluster over TLS."""
    own, _ = certificates
    settings = yaml.safe_load((own / "dask-tls.yaml").read_text())
    with dask.config.set(dask.config.merge(dask.config.config, settings)):
        credentials = Security()
    with forked(), mc.start(workers=1, memory_limit=10**9, security=credentials) as client:
        yield client.scheduler.address


def test_the_right_certificates_connect(address, certificates):
    own, _ = certificates
    with mc.connect(address, timeout=5, security=security(own, own)) as client:
        assert client.submit(sum, [1, 2]).result() == 3


@pytest.mark.parametrize(
    ("authority", "client", "said"),
    [
        ("other", "other", ("not to be trusted", "tls_ca_file=")),
        pytest.param("other", "own", ("not to be trusted", "tls_ca_file="), marks=pytest.mark.slow),
        ("own", "other", ("refuses this client's certificate", "tls_client_cert=")),
    ],
)
def test_wrong_certificates_are_refused_at_once(address, certificates, authority, client, said):
    folder = dict(zip(("own", "other"), certificates, strict=True))
    with pytest.raises(ClusterError) as caught:
        mc.connect(address, timeout=5, security=security(folder[authority], folder[client]))
    for words in (address, *said):
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tls_and_tcp_do_not_meet(address, certificates):
    own, _ = certificates
    with pytest.raises(ClusterError, match="if it uses TLS, connect to tls://"):
        mc.connect(address.replace("tls", "tcp"), timeout=5)
    with (
        mc.start(workers=1, memory_limit=10**9) as plain,
        pytest.raises(ClusterError, match="does not use TLS: connect to tcp://"),
    ):
        mc.connect(
            plain.scheduler.address.replace("tcp", "tls"), timeout=5, security=security(own, own)
        )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"tls_ca_file": "/nowhere/ca.pem", "tls_client_cert": "/nowhere/c.pem"},
            "/nowhere/ca.pem",
        ),
        ({"tls_ca_file": "not\nPEM", "tls_client_cert": "not\nPEM"}, "(in memory)"),
        ({"tls_client_cert": "client.pem"}, "without tls_ca_file"),
        ({}, "without tls_ca_file and tls_client_cert"),
    ],
)
def test_certificates_that_cannot_be_read_are_named(fields, said):
    with pytest.raises(OptionError) as caught:
        mc.connect("tls://127.0.0.1:9", security=Security(require_encryption=True, **fields))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


# -------------------------------------------------------------- dask's configuration


@pytest.mark.parametrize("path", sorted(CLUSTER.glob("dask-config/*.yaml")), ids=lambda x: x.name)
def test_dask_knows_every_setting(path):
    import distributed

    defaults = yaml.safe_load(Path(distributed.__file__).with_name("distributed.yaml").read_text())
    known = dict(leaves(defaults))
    found = dict(leaves(yaml.safe_load(path.read_text())))
    assert found
    for place, value in found.items():
        if place in ELSEWHERE:
            continue
        assert place in known, place
        assert value != known[place], f"{place}: the default again"


# ------------------------------------------------------------------ kubernetes


def pods() -> dict[str, dict]:
    cluster, _ = documents("cluster.yaml")
    (job,) = documents("product.yaml")
    return {
        "scheduler": cluster["spec"]["scheduler"]["spec"],
        "worker": cluster["spec"]["worker"]["spec"],
        "product": job["spec"]["template"]["spec"],
    }


@pytest.mark.parametrize("name", ["scheduler", "worker", "product"])
def test_pods_find_configuration_and_certificates(name):
    pod = pods()[name]
    (container,) = pod["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert environment["DASK_CONFIG"] == "/etc/multimm/tls"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts["tls"] == environment["DASK_CONFIG"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert set(mounts) == set(volumes)
    assert volumes["tls"]["secret"]["secretName"] == "multimm-tls"
    assert len({pod["containers"][0]["image"] for pod in pods().values()}) == 1


def test_the_kubernetes_cluster_holds_together():
    cluster, policy = documents("cluster.yaml")
    (job,) = documents("product.yaml")
    spec, name = cluster["spec"], cluster["metadata"]["name"]
    # The operator gives the service this name, and these labels to the pods.
    address = f"tls://{name}-scheduler:8786"
    worker = spec["worker"]["spec"]["containers"][0]
    assert {"name": "DASK_SCHEDULER_ADDRESS", "value": address} in worker["env"]
    assert address in job["spec"]["template"]["spec"]["containers"][0]["command"]
    service = spec["scheduler"]["service"]
    assert service["selector"]["dask.org/cluster-name"] == name
    offered = {port["name"] for port in spec["scheduler"]["spec"]["containers"][0]["ports"]}
    assert {port["targetPort"] for port in service["ports"]} == offered
    assert policy["spec"]["podSelector"]["matchLabels"]["dask.org/cluster-name"] == name
    labels = job["spec"]["template"]["metadata"]["labels"]
    clients = [
        source["podSelector"]["matchLabels"] for source in policy["spec"]["ingress"][0]["from"]
    ]
    assert labels in clients
    gpus = int(worker["resources"]["limits"]["nvidia.com/gpu"])
    asked = re.search(r"--workers=(\d+)", str(documents("product.yaml")))
    assert asked is not None
    assert int(asked[1]) == gpus * spec["worker"]["replicas"]
    share = next(a for a in worker["args"] if a.startswith("--memory-limit="))
    total = worker["resources"]["limits"]["memory"].replace("Gi", "GiB")
    assert parse_bytes(share.split("=")[1]) * gpus < parse_bytes(total)


# ----------------------------------------------------------------------- slurm

#: Stands in for two nodes: starts the command twice.
SRUN = """#!/usr/bin/env bash
[[ $1 == --kill-on-bad-exit=0 ]] || exit 1
shift
"$@" &
"$@" &
wait
"""
SBATCH = CLUSTER / "slurm" / "multimm.sbatch"


@pytest.mark.slow
def test_the_job_script_runs_a_product(tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {
        "srun": SRUN,
        "dask": f'#!/bin/sh\nexec "{sys.executable}" -W ignore -m dask "$@"\n',
        "python": f'#!/bin/sh\nexec "{sys.executable}" -W ignore "$@"\n',
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SLURM_JOB_ID": "7",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "MULTIMM_PROTOCOL": "tcp",
        "MULTIMM_INTERFACE": "lo",
        "MULTIMM_WORKER": "dask worker --no-nanny --nthreads=1 --memory-limit=1GB --no-dashboard",
    }
    program = ["python", str(CLUSTER / "product.py"), "$MULTIMM_SCHEDULER", "--workers=2"]
    with (tmp_path / "log").open("w+") as log:
        done = subprocess.run(
            ["bash", str(SBATCH), *program, "--size=500"],
            env=environment,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            timeout=100,
        )
        log.seek(0)
        assert done.returncode == 0, log.read()[-3000:]
    assert "on 2 CPU workers" in done.stdout
    assert "verified (20 rounds)" in done.stdout
    assert not list(tmp_path.glob("*.json")), "the scheduler's address is left behind"


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        ([], {"SLURM_JOB_ID": "7"}, "usage: sbatch"),
        (["true"], {}, "this script is for sbatch"),
    ],
)
def test_the_job_script_says_what_it_misses(arguments, variables, said):
    environment = {key: value for key, value in os.environ.items() if key != "SLURM_JOB_ID"}
    done = subprocess.run(
        ["bash", str(SBATCH), *arguments],
        env={**environment, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert said in done.stderr


def test_dask_jobqueue_writes_the_right_job(tmp_path):
    pytest.importorskip("dask_jobqueue", reason="dask-jobqueue is not installed")
    script = CLUSTER / "slurm" / "jobqueue.py"
    command = [script, "--dry-run", "--protocol=tcp", "--gpus=4", "--memory=400GB", "--queue=fast"]
    done = python("-W", "ignore", *command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for line in ("#SBATCH -p fast", "#SBATCH --gpus-per-node=4", "#SBATCH --nodes=1"):
        assert line in done.stdout.splitlines()
    assert re.search(
        r"-m dask_cuda\.cli tcp://\S+ .*--nthreads 1 --memory-limit 93\.13GiB .*"
        r"--rmm-pool-size 0\.8 --set-rmm-allocator-for-libs cupy .*--protocol tcp",
        done.stdout,
    )


# ------------------------------------------------------------------------- ssh


def test_ssh_workers_get_options_that_travel(monkeypatch):
    script = load(CLUSTER / "ssh" / "start.py")
    monkeypatch.setattr(script, "SSHCluster", lambda hosts, **options: (hosts, options))
    hosts, options = script.make_cluster(["a", "a", "b"], protocol="tls", interface="ib0")
    assert hosts == ["a", "a", "b"]
    # They go to the hosts as JSON on a command line in single quotes.
    for part in ("worker_options", "scheduler_options"):
        assert "'" not in json.dumps(options[part])
        assert options[part]["protocol"] == "tls"
    assert options["worker_class"] == "dask_cuda.CUDAWorker"
    assert options["worker_options"]["rmm_pool_size"] == 0.8
    assert set(options["scheduler_options"]) <= set(inspect.signature(Scheduler).parameters)
    _, options = script.make_cluster(["a", "b"], gpus=False)
    assert options["worker_class"] == "distributed.Nanny"
    assert "rmm_pool_size" not in options["worker_options"]
