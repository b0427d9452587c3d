"""Every size of a model that one did not train: calibrate, decompose, choose ranks, heal."""
