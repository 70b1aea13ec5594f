"""Model folders in Mistral's own format: params.json, consolidated*.safetensors, tekken.json.

A folder of the usual files is made from it once, in the user's cache; the weights stay where they
are and are presented under transformers' names. If a folder also has Hugging Face's weights, those
are read instead.
"""
