"""OpenAI's API, and llama.cpp's and vLLM's routes beside it."""
