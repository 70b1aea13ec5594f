"""Image processors of transformers that need torchvision, reimplemented without it."""
