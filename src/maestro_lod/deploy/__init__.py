"""Deployment: exported, verified and timed files of a model."""
