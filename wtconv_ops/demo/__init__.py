"""The demonstration: a photograph through a compiled, exported and packaged WTConv network.

Needs the extra ``demo`` (rich, matplotlib, scikit-learn); nothing else in the package imports it.
"""
