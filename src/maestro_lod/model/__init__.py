"""A whole model: what can be read of it and changed in it."""
