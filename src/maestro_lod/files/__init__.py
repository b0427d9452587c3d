"""Files: atomic writes, locks, tensor files, training state and the stage cache."""
