"""Build the archives, install the wheel where the checkout is not, and use it from there.

Run in the root of a checkout by an interpreter that has the extra `dev`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path

# Runs in the new environment: compares what was installed with the names it is given.
PROBE = """
import sys
from importlib import resources
from importlib.metadata import version
from pathlib import Path

import multimm
from multimm.gpu.runtime.kernel_source import kernel_text

expected = set(sys.argv[1:])
root = Path(str(resources.files("multimm.gpu"))) / "cuda"
assert "site-packages" in root.parts, f"multimm came from {root}"
found = {path.relative_to(root).as_posix() for path in root.rglob("*.cu*")}
assert found == expected, f"kernel sources {sorted(found)}, expected {sorted(expected)}"
assert not any(path.is_symlink() for path in (root, *root.rglob("*")))
for name in sorted(found):
    if name.endswith(".cu"):
        assert "__global__" in kernel_text(name, {}), name
assert version("dask-multimm") == multimm.__version__, version("dask-multimm")
print(f"multimm {multimm.__version__}: {len(found)} kernel sources read from {root}")
"""
BENCH = ("bench", "--quick", "--workers", "1", "--cases", "strong", "--peers", "none")
#: What a report of one sweep on CPU workers holds at least.
REPORTED = ("report.html", "tables.md", "strong-scaling.svg", "strong-scaling.png")


def run(*command: str | Path, cwd: Path | None = None, code: int = 0) -> str:
    """What a command prints, in an environment that knows nothing of the checkout."""
    ours = ("PYTHONPATH", "MULTIMM_COMMIT")
    environment = {key: value for key, value in os.environ.items() if key not in ours}
    begun = time.monotonic()
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print(f"{time.monotonic() - begun:4.0f} s  {Path(command[0]).name} {command[1]}", flush=True)
    if done.returncode != code:
        sys.exit(f"{done.stdout}\nexit code {done.returncode}, expected {code}")
    return done.stdout


def main() -> None:
    sources = [path for path in Path("kernels").rglob("*.cu*") if path.is_file()]
    names = [path.relative_to("kernels").as_posix() for path in sources]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        # Without options, `build` makes the wheel from the source archive: both are covered.
        run(sys.executable, "-m", "build", "--outdir", work / "dist")
        (wheel,) = (work / "dist").glob("*.whl")
        venv.create(work / "env", with_pip=True)
        python, multimm = (work / "env" / "bin" / name for name in ("python", "multimm"))
        run(python, "-m", "pip", "install", "--quiet", wheel)
        print(run(python, "-c", PROBE, *names, cwd=work))
        print(run(multimm, "doctor", cwd=work))
        use(python, multimm, work)


def use(python: Path, multimm: Path, work: Path) -> None:
    """Multiply, measure and draw, with what the extras need lent by this interpreter."""
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(run(python, "-c", asked).strip())
    # A path in such a file comes last, and files of this kind in there are not read: an editable
    # installation of multimm does not count.
    (packages / "lent.pth").write_text(sysconfig.get_path("purelib"))
    assert "All results are right" in run(
        multimm, "demo", "--workers", "1", "--size", "300", cwd=work
    )
    run(multimm, *BENCH, "--output", "records", cwd=work)
    run(multimm, "report", "--results", "records", cwd=work)
    missing = [name for name in REPORTED if not (work / "report" / name).is_file()]
    assert not missing, f"the report lacks {missing}"
    # The other project of this import name, as pip lays it over ours.
    other = packages / "multimm-2.0.2.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.4\nName: MultiMM\nVersion: 2.0.2\n")
    (other / "RECORD").write_text("multimm/__init__.py,,\n")
    (packages / "multimm" / "__init__.py").write_text('__version__ = "2.0.2"\n')
    told = run(multimm, "doctor", cwd=work, code=1)
    assert "MultiMM 2.0.2 is installed, which has the import name multimm, too" in told, told


if __name__ == "__main__":
    main()
