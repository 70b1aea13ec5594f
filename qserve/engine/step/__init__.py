"""One step as plain values: its arrays, its token masks, its tensors on the device."""
