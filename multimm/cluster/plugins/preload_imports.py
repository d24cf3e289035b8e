"""Begins imports in a GPU worker's process: to import this module begins them.

Dask imports it as the worker is made (a preload of `multimm.cluster.start`), and calls what is in
preloads later, when the transport has started: too late to use that time.
"""

from multimm.cluster.imports_ahead import IN_WORKERS, begin

begin(IN_WORKERS, driver=True)
