"""Bytes on disk: GGUF, ggml types, safetensors, tokenizers. No knowledge of models."""
