"""KV pages and recurrent states: allocation, prefix cache, host tier."""
