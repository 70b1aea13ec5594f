"""Run steps on one device: worker, model runner, CUDA graphs, sampling."""
