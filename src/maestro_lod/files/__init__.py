"""Files: written at once or not at all, read with care."""
