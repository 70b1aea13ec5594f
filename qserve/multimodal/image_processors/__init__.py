"""Scale, cut and normalize images as the processors of transformers that need torchvision."""
