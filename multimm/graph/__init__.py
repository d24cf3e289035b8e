"""Dask graphs of block products. Dask's internals are known here, and in `multimm.cluster`."""
