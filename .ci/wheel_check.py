"""Build the archives, install the wheel where the checkout is not, and use it from there.

Run in the root of a checkout by an interpreter that has `build`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

# Runs in the new environment: compares what was installed with the names it is given.
PROBE = """
import sys
from importlib import resources
from importlib.metadata import version
from pathlib import Path

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
print(f"multimm {version('dask-multimm')}: {len(found)} kernel sources read from {root}")
"""


def run(*command: str | Path, cwd: Path | None = None) -> None:
    # The checkout must not be found by way of the environment.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([str(part) for part in command], check=True, cwd=cwd, env=environment)


def main() -> None:
    sources = [path for path in Path("kernels").rglob("*.cu*") if path.is_file()]
    names = [path.relative_to("kernels").as_posix() for path in sources]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        # Without options, `build` makes the wheel from the source archive: both are covered.
        run(sys.executable, "-m", "build", "--outdir", work / "dist")
        (wheel,) = (work / "dist").glob("*.whl")
        venv.create(work / "env", with_pip=True)
        python = work / "env" / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", wheel)
        run(python, "-c", PROBE, *names, cwd=work)
        run(work / "env" / "bin" / "multimm", "doctor", cwd=work)


if __name__ == "__main__":
    main()
