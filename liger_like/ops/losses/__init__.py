"""Cross-entropy of given logits, and of a linear layer whose logits are computed for one chunk of tokens at a time."""
