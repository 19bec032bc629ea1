"""Triton kernels for training LLMs: plain functions, drop-in modules, and one-line patching of Hugging Face models."""
