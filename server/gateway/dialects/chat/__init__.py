"""OpenAI's chats, to which other APIs of chats are translated."""
