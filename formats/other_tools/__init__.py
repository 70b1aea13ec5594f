"""Formats of other tools, which are read only: bitsandbytes, torchao, HQQ, ModelOpt, Quark."""
