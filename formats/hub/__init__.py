"""Models by their name on the Hugging Face hub: names, selection of files, downloads.

Importing the package loads no network library: huggingface_hub is imported when a name is fetched.
"""
