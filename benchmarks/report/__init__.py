"""Tables, figures and a page of the records: python -m benchmarks.report, multimm report."""
