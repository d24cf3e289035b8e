"""Several hosts, as far as one machine has them: network namespaces, joined by a switch.

`on_hosts.py` starts scheduler and workers there, over TLS, with the certificates and the
configuration that `cluster/` makes, multiplies, and pulls a cable in mid-run. It needs the right to
make network namespaces: root's, or that of user namespaces. Many containers have neither.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import multimm

pytestmark = pytest.mark.slow

ROOT = Path(multimm.__file__).parents[1]
#: Dask takes no less; the recipe waits a little longer.
NOTICED_AFTER = 11
#: As root, and as somebody who is root in a user namespace of his own.
WAYS = (["unshare", "--net"], ["unshare", "--user", "--map-root-user", "--net"])
TRIAL = "ip link add trial type bridge && ip link add here type veth peer name there"


def into_a_network_of_ones_own() -> list[str]:
    """The command that starts another in a network namespace that it may change."""
    missing = [name for name in ("unshare", "ip") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no command {', '.join(missing)} (Debian: util-linux and iproute2)")
    for way in WAYS:
        trial = subprocess.run([*way, "sh", "-c", TRIAL], capture_output=True, text=True)
        if trial.returncode == 0:
            return way
    pytest.skip(f"this kernel or container allows no network namespaces: {trial.stderr.strip()}")


def make_certificates(directory: Path) -> Path:
    script = ROOT / "cluster" / "tls" / "make_certificates.py"
    subprocess.run([sys.executable, script, directory], check=True, stdout=subprocess.DEVNULL)
    return directory


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What happened on the hosts."""
    way = into_a_network_of_ones_own()
    folder = tmp_path_factory.mktemp("hosts")
    own, stranger = (make_certificates(folder / name) for name in ("own", "stranger"))
    configuration = folder / "dask"
    configuration.mkdir()
    for file in (own / "dask-tls.yaml", ROOT / "cluster" / "dask-config" / "network.yaml"):
        shutil.copy(file, configuration)
    environment = {
        **os.environ,
        "DASK_CONFIG": str(configuration),
        "DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": f"{NOTICED_AFTER}s",
        "PYTHONPATH": str(ROOT),
    }
    log = folder / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*way, sys.executable, Path(__file__).with_name("on_hosts.py"), stranger],
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    try:
        # The scheduler and the workers hold the pipe open; the last line is all there is to read.
        assert process.wait(timeout=150) == 0, log.read_text()[-6000:]
    except subprocess.TimeoutExpired:
        pytest.fail(f"the hosts did not come to an end:\n{log.read_text()[-6000:]}")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    return json.loads(output.splitlines()[-1])


def test_every_worker_is_on_a_host_of_its_own_and_speaks_tls(seen):
    hosts = [address.rpartition(":")[0] for address in seen["workers"]]
    assert hosts == [f"tls://10.77.0.{number}" for number in (2, 3, 4)]


def test_a_product_over_three_hosts_is_right(seen):
    assert seen["spread"]["right"]


def test_wrong_certificates_are_refused_with_what_to_do(seen):
    assert "is not to be trusted" in seen["stranger"]
    assert "tls_ca_file=" in seen["stranger"]
    assert "refuses this client's certificate" in seen["half a stranger"]
    assert "tls_client_cert=" in seen["half a stranger"]
    assert "connect to tls://" in seen["without TLS"]


def test_a_host_that_is_cut_off_costs_its_own_work_alone(seen):
    assert seen["cut"]["right"]
    assert seen["cut"]["kept"] > 50
    assert seen["cut"]["moved"] == []
    assert seen["cut"]["to notice"] < NOTICED_AFTER + 5
    # What was lost, and the rest of what was to be done anyway: less than the whole again, and
    # some for the times on a busy machine.
    assert seen["cut"]["seconds"] < 2 * seen["spread"]["seconds"] + 5
