"""The experts' products in Gluon, for Hopper GPUs."""
