"""Analysis, surgery, cost and files of whole models."""
