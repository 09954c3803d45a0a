"""The APIs that people's programs know: each a `Dialect`, in a file of its own, and below them the files they share.

openai           /v1/…: OpenAI's models, completions and chats; vLLM's /tokenize and /detokenize
responses        /v1/responses: OpenAI's items, some kept for the next request
anthropic        /v1/messages
ollama           /api/…
embeddings       /v1/embeddings, Ollama's, and /v1/rerank
audio            /v1/audio/transcriptions and translations
websocket        /ws/generate: OpenAI's chats and completions as messages
audio_files      files with sound: forms as they come, and samples
responder        from a request to its answer, whole or as a stream
remote_pictures  pictures that are named by their address on the web
chat_request     chats: messages and tools in them
request_bodies   the class of all bodies, ways to choose tokens, completions

`app` lists the dialects. Each has the same shape: a `Body` for a request, which makes a chat or a completion of it, an
`Answer`, which writes our events in the API's own way, and a class of handlers, which may say how errors look.
"""
