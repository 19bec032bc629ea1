"""Attention kernels in Gluon, for Hopper GPUs."""
