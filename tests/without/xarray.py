"""In the place of xarray, in processes that tests start: see `conftest.WITHOUT`."""

raise ImportError("left out")
