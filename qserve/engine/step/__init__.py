"""Inputs of one step: arrays on the host, token masks, tensors on the device."""
