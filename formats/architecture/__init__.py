"""Model architectures as config.json and tensor names state them."""
