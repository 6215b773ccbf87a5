"""The documentation's build: Sphinx with MyST, the API from the docstrings."""

from docutils import nodes
from sphinx.application import Sphinx

import pdecay

project = "pdecay"
author = "The pdecay authors"
copyright = "2026, The pdecay authors"
version = release = pdecay.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx-mathjax-offline"]
extensions += ["sphinx_copybutton"]  # a button beside each code block
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "_data"]
html_theme = "furo"
html_title = f"pdecay {version}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

autodoc_member_order = "bysource"
maximum_signature_line_length = 88  # longer ones have one parameter a line, with its type
napoleon_custom_sections = []
# Otherwise "lr, betas, eps: as in AdamW" becomes three items with the same text.
napoleon_use_param = False


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", _strip_code)


def _strip_code(_: Sphinx, document: nodes.document) -> None:
    """Remove the blank line that a doctest needs at the end of a block."""
    for block in document.findall(nodes.literal_block):
        if block.rawsource == block.astext():
            block.rawsource = block.rawsource.rstrip()
            block.children = [nodes.Text(block.rawsource)]
