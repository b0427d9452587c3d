"""The same training on many processes: what they agree on, and wrappers that follow a shrink."""
