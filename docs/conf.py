"""The documentation's build: Sphinx with MyST, the API from the docstrings."""

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
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_custom_sections = []
