"""`multimm.verify` and its parts: operands, error bounds, block tasks, verdicts, graph."""
