"""Conversion of published files to the canonical form: config keys, tensor names, order of dims.

The canonical form has the keys of a Llama config and the names and shapes of the family's row. For
example, GPT-2's config.json has different keys (`n_embd`), its weights are [inputs, outputs], its
names may lack a prefix, and its masks are stored. The reader adds the canonical keys, drops the
masks, and presents weights as [outputs, inputs]; the writer restores the stored form.
"""
