"""Token mixers with recurrent states of fixed size."""
