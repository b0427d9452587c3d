"""Search of the penalty λ: `lod tune`."""
