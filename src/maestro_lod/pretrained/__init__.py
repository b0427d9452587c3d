"""Pretrained models: compress, correct and distill them."""
