"""Plain PyTorch models: not one parallel line in them. They import torch alone."""
