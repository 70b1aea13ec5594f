"""Multi-head latent attention over paged latents (DeepSeek-V2, arXiv 2405.04434)."""
