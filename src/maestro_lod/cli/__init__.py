"""The program `lod`."""
