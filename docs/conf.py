"""Settings of the documentation."""

import os
import pathlib
import sys

HERE = pathlib.Path(__file__).parent
# The pages of methods take their facts from `tests/algorithms_table.py`.
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent / "tests"), str(HERE.parent)]

import repository  # noqa: E402

import jaxfl  # noqa: E402
from jaxfl._support.backend import compile_quickly  # noqa: E402

# Otherwise each run of a notebook would advise its readers to configure JAX.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "1")
# The runs here and in the notebooks are small, so that optimising them would take most of the time.
compile_quickly()

# A kernel pretends that its output is a terminal, so a progress bar would print all of its states.
os.environ["TTY_COMPATIBLE"] = "0"

project, author = "jaxfl", "The jaxfl authors"
copyright = "the jaxfl authors"
release = version = jaxfl.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx-mathjax-offline",
    "sphinx_copybutton",
    "docstrings",
    "pages",
]
exclude_patterns = ["_build", "README.md"]

html_theme = "sphinx_book_theme"
html_title = "jaxfl"
html_logo = html_favicon = "_static/logo.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = html_show_sourcelink = False
html_theme_options = {
    "logo": {"text": f"jaxfl {version}"},
    "show_toc_level": 2,
    "home_page_in_toc": False,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "navbar_persistent": [],
}
if address := repository.address(HERE.parent):
    link = {"name": "Repository", "url": address, "icon": "fa-brands fa-git-alt"}
    html_theme_options["icon_links"] = [link]

myst_enable_extensions = ["dollarmath", "deflist", "colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "cache"
nb_render_markdown_format = "myst"  # with tables
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_execution_timeout = 300
nb_execution_show_tb = True

autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
default_role = "name"
napoleon_custom_sections = ["Guarantee", "Deviations from the paper"]
napoleon_use_rtype = False
python_maximum_signature_line_length = 78
copybutton_exclude = ".linenos, .gp, .go"
