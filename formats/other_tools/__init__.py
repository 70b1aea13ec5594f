"""Formats of other tools, which are only read: bitsandbytes, torchao, HQQ, ModelOpt, Quark."""
