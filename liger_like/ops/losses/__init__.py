"""Cross-entropy of logits, and of a linear layer whose logits exist for a chunk of tokens at a time."""
