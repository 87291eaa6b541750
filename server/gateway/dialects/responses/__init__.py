"""OpenAI's newer API of chats, which keeps its answers."""
