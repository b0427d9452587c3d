"""Every table and figure of the paper that two CPU cores can reach, beside the paper's own numbers.

An item is a module with `TITLE`, `measure(scale)`, which does the work and returns its result as
plain data, `markdown(result)`, its part of the README, and `figures(result)`, name -> SVG.
"""
