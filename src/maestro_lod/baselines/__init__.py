"""Systems to compare with: loaded by name, imported by nothing."""
