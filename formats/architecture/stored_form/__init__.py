"""Published files in the usual form: keys of config.json, names of tensors, order of dims.

For example, GPT-2's config.json has different keys (`n_embd`), its weights are [inputs, outputs],
its names may lack a prefix, and its masks are stored. The reader adds the usual keys, drops the
masks, and presents weights as [outputs, inputs]; the writer restores the stored form.
"""
