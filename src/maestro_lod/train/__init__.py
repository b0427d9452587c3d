"""Training: the loop, the methods, and what they share."""
