"""Tables and figures of the paper that two CPU cores can reach, next to its own numbers.

An item is a module with `TITLE`, `measure(scale)`, which does the work and returns its result as
plain data, `markdown(result)`, its part of the README, and `figures(result)`, name -> SVG.
"""
