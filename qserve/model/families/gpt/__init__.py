"""GPT-2, GPT-J, GPT-Neo, GPT-NeoX, CodeGen, BLOOM and MPT."""
