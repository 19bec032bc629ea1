"""Attention kernels in Triton, for every GPU and every option."""
