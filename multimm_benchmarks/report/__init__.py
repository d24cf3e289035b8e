"""Tables, figures and a page of the records: python -m multimm_benchmarks.report."""
