"""Compression methods to compare with; other packages name them but never import them."""
