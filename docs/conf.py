"""The site of the documentation: `make docs`. Its sources are the repository's Markdown files, where they lie."""

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

import generated  # noqa: E402  (it lies beside this file)

project = "Lacquer"
author = copyright = "The Lacquer developers"
root_doc = "docs/index"
include_patterns = ["docs/**.md", "[A-Z]*.md"]
exclude_patterns = ["README.md", "build", "runs", "tests", ".*"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["attrs_inline"]
myst_heading_anchors = 4
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False
autodoc_member_order = "bysource"
add_module_names = False

html_theme = "furo"
html_title = "Lacquer"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}

CONTENTS = (root_doc, "docs/results/README")
"""Pages of contents: lists of links below headings."""
GENERATED = {
    "docs/settings": generated.settings_tables,
    "docs/methods": generated.methods_index,
    "docs/api": generated.api_directives,
    "docs/troubleshooting": generated.refusals_list,
}
"""Pages to which something of the code is appended."""
SECTION = re.compile(r"^## (.+)\n((?:.*\n)*?)(?=^## |\Z)", re.MULTILINE)
LINK = re.compile(r"^- \[([^\]]+)\]\(([^)#]+)\)", re.MULTILINE)
PICTURE = re.compile(r'<picture>\s*<source[^>]*>\s*<img alt="([^"]*)" src="([^"]*)-light\.svg">\s*</picture>')
TO_START = '<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html"><title>Lacquer</title>\n'


def tree(contents: str) -> str:
    """The toctrees that the lists of links below the headings of the page of contents stand for."""
    trees = []
    for heading, below in SECTION.findall(contents):
        pages = "\n".join(f"{title} <{path}>" for title, path in LINK.findall(below))
        trees.append(f"```{{toctree}}\n:hidden:\n:caption: {heading}\n\n{pages}\n```\n")
    return "\n".join(trees)


def adapt(app: Sphinx, name: str, source: list[str]) -> None:
    """What a Git host does not need: the tree, what is generated, pictures that follow the theme's switch."""
    if name in CONTENTS:
        source[0] += "\n" + tree(source[0])
    if name in GENERATED:
        source[0] += "\n" + GENERATED[name]()
    source[0] = PICTURE.sub(r"![\1](\2-light.svg){.only-light}![\1](\2-dark.svg){.only-dark}", source[0])


def write_methods(app: Sphinx) -> None:
    """Before the sources are looked for."""
    generated.write_method_pages(DOCS / "methods")


def write_start(app: Sphinx, error: Exception | None) -> None:
    """A page at the root of the site, which leads to the first one."""
    if error is None and app.builder.format == "html":
        (Path(app.outdir) / "index.html").write_text(TO_START, encoding="utf-8")


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", write_methods)
    app.connect("source-read", adapt)
    app.connect("build-finished", write_start)
