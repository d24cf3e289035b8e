"""In the place of sparse, in processes that tests start: see `conftest.WITHOUT`."""

raise ImportError("left out")
