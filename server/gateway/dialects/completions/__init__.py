"""OpenAI's completions of texts and token ids."""
