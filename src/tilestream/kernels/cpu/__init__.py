"""Persistent worker threads over torch.mm: the default where there is no GPU."""
