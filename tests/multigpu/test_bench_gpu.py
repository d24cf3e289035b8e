"""`multimm bench` on GPUs, beside whichever peers are installed."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from multimm.cli import main
from multimm_benchmarks import records


@pytest.mark.multigpu(1)
@pytest.mark.slow
def test_a_quick_sweep_on_one_gpu(tmp_path, known_commit):
    arguments = ["bench", "--quick", "--gpus", "1", "--cases", "strong,tall", "--peers",
                 "dask.array,cupy,cublasxt", "--output", str(tmp_path)]  # fmt: skip
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.iterdir()
    found = records.load(path)
    assert len(found) == 2 * (2 + 3)  # `ieee` is left out where time is short; three peers
    for record in found:
        detail = record["detail"]
        assert (detail["status"], detail["reason"]) == ("done", ""), (record["case"], detail)
        assert record["tflops"] > 0
    ours = {r["precision"]: r for r in found if r["system"] == "multimm" and "strong" in r["case"]}
    assert ours["float32"]["componentwise_u"] <= 24
    assert ours["float32"]["detail"]["one_worker_tflops"] > 0


@pytest.mark.multigpu(2)
@pytest.mark.slow
def test_what_two_gpus_receive_is_what_was_planned(tmp_path, known_commit):
    arguments = ["bench", "--quick", "--gpus", "2", "--cases", "strong", "--peers", "none",
                 "--output", str(tmp_path)]  # fmt: skip
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.iterdir()
    for record in records.load(path):
        # A packed block is counted with its scales; operands were at home.
        assert 0 < record["bytes_received"] <= 1.05 * record["bytes_predicted"]
