"""Text to tokens and back: tokenizer files, chat templates and endings."""
