"""Choice of ranks: frontiers, calibration, latency and allocation."""
