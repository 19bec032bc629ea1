"""The kernels under torch.distributed: ..."""
