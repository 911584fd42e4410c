"""Files that an export of Orthros copies beside its tensors; they import PyTorch and transformers."""
