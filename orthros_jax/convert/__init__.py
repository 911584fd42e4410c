"""Models from and to Hugging Face folders: `load.load_hf`, and the commands `import` and `export`."""
