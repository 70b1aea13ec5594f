"""Multi-head latent attention (MLA), its LoRA adapters and its indexer."""
