"""edgeft: fine-tunes LLaMA-class language models on the machine they will run on."""

__version__ = "0.1.0"
