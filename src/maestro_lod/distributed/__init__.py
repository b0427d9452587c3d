"""Training in several processes: agreement between them, and wrappers that follow a shrink."""
