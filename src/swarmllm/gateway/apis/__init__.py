"""The APIs that people's programs know. Files that come later don't know earlier ones.

websocket        chats and completions as messages of a WebSocket
translated_routes  routes of the next three: translations to chats
anthropic        Anthropic's requests and answers
ollama           Ollama's
responses        OpenAI's items, some kept for the next request
openai           /v1/…: OpenAI's models, completions and chats; vLLM's /tokenize and /detokenize
embeddings       /v1/embeddings, Ollama's, and /v1/rerank
audio            /v1/audio/transcriptions and translations
audio_files      files with sound: forms as they come, and samples
responder        from a request to its answer, whole or as a stream
remote_pictures  pictures that are named by their address on the web
chat_request     chats: messages and tools in them
request_bodies   the class of all bodies, ways to choose tokens, completions
"""
