"""Notebooks: sources in percent format, and the .ipynb that Colab opens, made from them."""
