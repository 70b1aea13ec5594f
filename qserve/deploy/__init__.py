"""Many engines as one service. Knows no tensors; what carries them over machines is Ray's."""
