"""Which ranks to keep for which size."""
