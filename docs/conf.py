"""The documentation site: `make docs` builds it from the Markdown of this repository.

The source folder is the root of the checkout, so that links between documents are the same here and
on a code host. `include_patterns` says which documents are pages.
"""

from __future__ import annotations

import sys
from pathlib import Path

from jupyter_client.manager import KernelManager

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "multimm"
author = "multimm developers"
html_title = "multimm"
smartquotes = False  # "--close" is an option, and no dash

extensions = [
    "myst_nb",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_click",
    "from_code",
]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "cluster/**.md",
    "docker/README.md",
    "kernels/README.md",
    "benchmarks/README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
]
# Lists of pages for code hosts: the site has its own.
exclude_patterns = ["docs/README.md", ".*", "build", "dist", "tests", "**/node_modules"]

# Docstrings. numpydoc shows the types, so signatures don't.
autosummary_generate = False
autodoc_typehints = "none"
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
# Names in single backticks are links where this site has them: others are parameters, or of NumPy.
default_role = "py:obj"
nitpick_ignore_regex = [("py:obj", ".*")]

# Markdown. Anchors of headings are those of code hosts.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]
suppress_warnings = ["myst.header"]

# Notebooks run at each build: nothing that they show is older than the code.
nb_execution_mode = "force"
nb_execution_timeout = 120
nb_execution_in_temp = True
nb_execution_show_tb = True
nb_execution_raise_on_error = False
nb_merge_streams = True
# Kernels listen on ports of this host: with keys, where jupyter_client can.
if hasattr(KernelManager, "transport_encryption"):
    KernelManager.transport_encryption.default_value = "auto"

html_theme = "pydata_sphinx_theme"
html_favicon = "_static/icon.svg"
html_context = {"default_mode": "auto"}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["_static/index.html"]
html_copy_source = False
html_show_sourcelink = False
# Pages of the first level have no pages beside them to list.
ALONE = ("benchmarks", "first-run", "from-dask", "get-started", "supported", "troubleshooting")
html_sidebars = {f"docs/{name}": [] for name in ALONE} | {"C*": [], "benchmarks/*": []}
html_theme_options = {
    "logo": {"text": "multimm"},
    "navbar_align": "left",
    "header_links_before_dropdown": 6,
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": [],
    "navigation_with_keys": False,
}
