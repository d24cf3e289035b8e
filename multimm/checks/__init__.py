"""The parts of `multimm.verify`: operands, error bounds, block tasks, verdicts, graph."""
