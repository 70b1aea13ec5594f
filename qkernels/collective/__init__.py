"""All-reduce between GPUs that read each other's memory."""
