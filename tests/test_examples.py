"""Each example runs on CPU workers and finds what scikit-learn, xarray or NumPy find."""

from __future__ import annotations

import inspect
import runpy
from pathlib import Path

import pytest
from clusters import forked
from commands import python

import multimm

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
#: Those that are functions, for whatever cluster is there.
FUNCTIONS = [path for path in EXAMPLES if path.stem != "quickstart"]


@pytest.fixture(scope="module")
def workers():
    """What each of them starts, once for all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        with forked(), multimm.cluster.start():
            yield


@pytest.mark.slow
@pytest.mark.usefixtures("workers")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("example", FUNCTIONS, ids=lambda path: path.stem)
def test_example(example, tmp_path, capsys):
    main = runpy.run_path(str(example))["main"]
    main(*[tmp_path] * len(inspect.signature(main).parameters))
    assert capsys.readouterr().out


@pytest.mark.slow
def test_a_script_starts_its_workers_and_leaves_nothing(tmp_path):
    script = ROOT / "examples" / "quickstart.py"
    done = python(script, cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout
    assert not list(tmp_path.iterdir())
