"""Draft heads on disk: EAGLE-3, EAGLE and Medusa, their config.json and their tensors' names."""
