"""Model architectures: how config.json and tensor names describe them."""
