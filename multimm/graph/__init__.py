"""Dask graphs of block products; the only code that knows Dask's internals."""
