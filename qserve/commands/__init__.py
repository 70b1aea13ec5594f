"""Commands that need a module of their own: run-batch, chat, complete, compare."""
