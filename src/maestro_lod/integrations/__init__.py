"""Thin bridges to other frameworks; each file imports its own, and nothing else imports them."""
